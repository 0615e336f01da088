"""This rank's part in coming to one plan with the others that gather a model's parameters with it (FSDP2).

The rule is told in `agreement`; here is what this rank knows, says and judges.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_mimose.actions.session import Session
from lightning_mimose.advise.advice import Advice, with_reserve
from lightning_mimose.advise.advisor import Advisor
from lightning_mimose.agreement import Agreement, Choices, Judgement, Refusal, Word
from lightning_mimose.engine.attachment import Attachment
from lightning_mimose.engine.refusal import Refuser
from lightning_mimose.errors import BudgetInfeasibleError
from lightning_mimose.plan import Plan
from lightning_mimose.predict.shapes import Resident
from lightning_mimose.sizes import BatchSize


class Consensus:
    """Comes to one plan with the other ranks.

    Args:
        advisor: What this rank knows.
        refuser: Refuses a batch that fits on no rank's plan.
        session: Knows what is never recomputed here, and is told what the others know about that.
        attachment: Tells plans and shelter of it.
    """

    def __init__(
        self,
        advisor: Advisor,
        refuser: Refuser,
        session: Session,
        attachment: Attachment,
    ) -> None:
        self._advisor = advisor
        self._refuser = refuser
        self._session = session
        self._attachment = attachment

    def reach(
        self,
        agreement: Agreement,
        size: BatchSize,
        resident: Resident,
        advice: Advice,
        error: BudgetInfeasibleError | None,
    ) -> tuple[Advice, dict[str, str] | None]:
        """Come to one plan.

        Args:
            agreement: How they talk.
            size: The batch's size here.
            resident: What is resident here.
            advice: What this rank would do alone.
            error: Why it refuses its batch, if it does.

        Returns:
            What the plan is here, and what all ranks do (None: they are sheltered, or as in the plan).

        Raises:
            BudgetInfeasibleError: A rank refuses its batch.
        """
        advisor = self._advisor
        sheltered = Advice(None, None, False)
        if advice.bounded:
            advice = sheltered  # it could not judge what another rank proposes
        own = None if advice.plan is None else advice.plan.choices
        words: list[Word] = agreement.tell(Word(dict(self._session.refused), own, Refusal.of(error)))
        agreement.raise_first([word.refusal for word in words], error)
        known = {unit: reason for word in words for unit, reason in word.refused.items()}
        if any(word.refused.keys() != known.keys() for word in words):
            self._session.refuse(known)
            self._attachment.take_refusals()
            return sheltered, None
        plans = [word.choices for word in words if word.choices is not None]
        if len(plans) < len(words) or advice.plan is None:
            return sheltered, None
        if len(set(plans)) == 1:
            return advice, None
        judged = advisor.judge(size, resident)

        def judge(choices: Choices) -> Judgement | None:
            found = judged(choices)
            # This rank's own is what it would do alone, whatever it leaves free.
            return replace(found, fits=True) if found is not None and choices == own else found

        def within(choices: Choices) -> Judgement | None:
            found = judged(choices)
            return None if found is None else replace(found, fits=found.peak_bytes <= advisor.budget_bytes)

        chosen = agreement.choose(plans, judge)
        if chosen is None:
            least = advisor.most_saving(size, resident).plan
            last = (None if least is None else least.choices, advisor.may_shelter(size, resident))
            told: list[tuple[Choices | None, bool]] = agreement.tell(last)
            plans += [choices for choices, _ in told if choices is not None]
            chosen = agreement.choose(plans, within)
            if chosen is None and all(sheltered_fits for _, sheltered_fits in told):
                return sheltered, None
        found = judged(chosen) if chosen is not None else None
        if chosen is None or found is None:
            needed = min((each.peak_bytes for choices in plans if (each := judged(choices)) is not None), default=0)
            how = "under a plan that all ranks share"
            self._refuser.refuse(size, resident, needed, with_reserve(needed), how)
            return sheltered, None
        plan = Plan(found.choices, advice.plan.units, found.peak_bytes, found.added_seconds)
        return Advice(plan, found.peak_bytes, advice.cache_hit), dict(chosen)
