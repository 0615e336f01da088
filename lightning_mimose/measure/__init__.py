"""Meters and the collector: what a step holds, measured."""
