"""From what a step would hold to the plan that keeps it inside the budget. Touches no tensor and no Lightning."""

from lightning_mimose.plan.cache import PlanCache
from lightning_mimose.plan.plan import Plan
from lightning_mimose.plan.planner import Planner
from lightning_mimose.plan.scheduler import PlannerChoice, Scheduler, check_planner

__all__ = ["Plan", "PlanCache", "Planner", "PlannerChoice", "Scheduler", "check_planner"]
