"""The estimator: input size -> every column of a step's structure, and how far to trust it.

The paper fits one quadratic per module in one scalar. Here every column (saved bytes, working sets, levels,
operations) is a polynomial in the named dimensions that vary, with non-negative coefficients where that fits,
which is exact as long as the kernels do not change. Trust is measured: each size is predicted from the others,
and a size outside the range seen, or a fit that leaves residuals, is not trusted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from lightning_mimose.predict.features import Basis, Relation, bases, varying_dims
from lightning_mimose.predict.structure import CallShape, LeanShape, LooseShape, Position, Structure

GOOD_ERROR = 0.005
"""Share of the step's peak by which a left-out size may be mispredicted for a fit to be trusted at once."""
USABLE_ERROR = 0.05
"""The same, once there are enough sizes: the error is then added to every prediction as a margin."""
LEAN_ERROR = 1e-3
"""The same for the peaks of a grade of lean saves, which is not planned with beyond it."""
EXACT_ERROR = 1e-4
"""An error of this share is rounding: the basis is the right one."""
LEVERAGE = 1e-6
"""A size that leaves less than this of itself to the others in a fit (it is far from all of them) is fitted without."""
MAX_OBSERVATIONS = 48
MAX_STRUCTURES = 8
FORGET_AFTER = 20
"""Steps in a row on the same part of the longest path seen, after which that one counts as a thing of the past."""


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a step of some size is expected to look like.

    Attributes:
        structure: Its shape.
        values: Shape (structure.columns,).
        error: Expected error as a share of the step's peak.
        trusted: Whether plans may be built on it.
        doubtful: Grades of lean saves whose peaks do not follow the fit (kernels that change with the size).
        dims: The named dimensions it is for.
    """

    structure: Structure
    values: NDArray[np.float64]
    error: float
    trusted: bool
    doubtful: frozenset[str] = frozenset()
    dims: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Fit:
    basis: Basis
    coefficients: NDArray[np.float64]
    error: float
    sizes: int
    low: Mapping[str, int]
    high: Mapping[str, int]
    doubtful: frozenset[str]
    relations: tuple[Relation, ...]

    def covers(self, dims: Mapping[str, int]) -> bool:
        """Whether all that differs from what the fit has seen is a dimension that varied there, in the same way."""
        return (
            self.low.keys() == dims.keys()
            and all(self.low[name] < self.high[name] or self.low[name] == value for name, value in dims.items())
            and all(relation.holds(dims) for relation in self.relations)
        )


class Estimator:
    """Learns from observed steps; predicts others.

    Args:
        patience: Sizes after which a fit with small residuals is used with a margin, for each varying dimension.
    """

    def __init__(self, patience: int = 5) -> None:
        self.resident_bytes = 0
        """What is resident besides activations: errors are shares of a step's whole peak."""
        self._patience = patience
        self._enough = 0
        self._measured_since: set[tuple[tuple[str, int], ...]] = set()
        self._observed: dict[Structure, dict[tuple[tuple[str, int], ...], NDArray[np.float64]]] = {}
        self._fits: dict[tuple[Structure, int | None], _Fit | None] = {}
        self._latest: Structure | None = None
        self._shorter = 0
        self._shorter_path: Structure | None = None
        self.varies = False
        """Whether steps were seen that left out calls of others (layers dropped at random)."""
        self._rate: float | None = None

    def __len__(self) -> int:
        """Number of distinct sizes observed."""
        return sum(len(sizes) for sizes in self._observed.values())

    def add(self, dims: Mapping[str, int], structure: Structure, values: NDArray[np.float64]) -> None:
        """Learn from one measured step.

        Args:
            dims: Named dimensions of its batch.
            structure: Its shape.
            values: Shape (structure.columns,).
        """
        # A step that leaves calls out needs less than the next one may: only the longest path is learnt from.
        if any(structure.calls_made < other.calls_made for other in self._observed):
            self.varies = True
            self._shorter = self._shorter + 1 if structure == self._shorter_path else 1
            self._shorter_path = structure
            if self._shorter < FORGET_AFTER:
                return
        self._shorter = 0
        for other in list(self._observed):
            if other.calls_made < structure.calls_made or structure.calls_made < other.calls_made:
                self.varies = True
                del self._observed[other]
        known = self._observed.setdefault(structure, {})
        key = tuple(sorted(dims.items()))
        known.pop(key, None)
        known[key] = values
        if len(self) < self._enough:
            self._measured_since.add(key)
        if len(self._observed) > MAX_STRUCTURES:
            del self._observed[next(s for s in self._observed if s != structure)]
        if len(known) > MAX_OBSERVATIONS:
            # Oldest first, but never the extremes of a dimension, which span the range that is trusted.
            ranges = [[known_key[i][1] for known_key in known] for i in range(len(key))]
            low, high = [min(values) for values in ranges], [max(values) for values in ranges]
            inner = (k for k in known if all(low[i] < k[i][1] < high[i] or low[i] == high[i] for i in range(len(k))))
            known.pop(next(inner, next(iter(known))))
        # The very object that is a key: comparing two equal ones takes milliseconds.
        self._latest, self._rate = next(s for s in self._observed if s == structure), None
        self._fits.clear()

    def observations(self) -> Iterator[tuple[dict[str, int], Structure, NDArray[np.float64]]]:
        """Every size that was measured, the newest last: named dimensions, shape of the step, columns."""
        for structure, known in self._observed.items():
            for key, values in known.items():
                yield dict(key), structure, values

    def distrust(self) -> None:
        """A prediction was wrong: the fit looked better than it was. Ask for two more sizes.

        They may never come: a size that is measured from now on is believed, whatever others there are.
        """
        self._enough = len(self) + 2
        self._measured_since.clear()

    def predict(self, dims: Mapping[str, int]) -> Prediction | None:
        """Predict a size; None before anything was observed, or if the batch has other dimensions."""
        structure = self._latest
        if structure is None:
            return None
        key = tuple(sorted(dims.items()))
        seen = [structure for structure, known in self._observed.items() if key in known]
        if seen:
            # The same size on several paths (layers dropped at random): which one comes next is anybody's guess.
            believed = key in self._measured_since or len(self) >= self._enough
            trusted = len(seen) == 1 and believed and self._is_complete()
            return Prediction(seen[-1], self._observed[seen[-1]][key], 0.0, trusted, dims=dims)
        best: Prediction | None = None
        for batch in (dims.get("batch"), None):
            fit = self._fit(structure, batch)
            if fit is None or not fit.covers(dims):
                continue
            values = np.maximum(fit.basis.features(dims) @ fit.coefficients, 0.0)
            prediction = Prediction(structure, values, fit.error, self._trusted(fit, dims), fit.doubtful, dims)
            if prediction.trusted:
                return prediction
            best = best or prediction
        return best

    def completed(self, dims: Mapping[str, int], named: Collection[str]) -> dict[str, int]:
        """A size of which some dimensions were named: those that always followed from others do so here."""
        found = dict(dims)
        for relation in self.relations:
            if relation.name not in named and found.keys() >= {relation.name, *relation.others}:
                found[relation.name] = max(0, round(relation.value(found)))
        return found

    @property
    def relations(self) -> tuple[Relation, ...]:
        """What followed from what in all sizes of the latest path."""
        fit = self._fit(self._latest, None) if self._latest is not None else None
        return () if fit is None else fit.relations

    def _selected(self, structure: Structure, batch: int | None) -> list[tuple[tuple[str, int], ...]]:
        return [key for key in self._observed[structure] if batch is None or dict(key).get("batch") == batch]

    def _fit(self, structure: Structure, batch: int | None) -> _Fit | None:
        """The fit over all sizes, or over those of one batch size (a shorter last batch must not disturb them)."""
        known = self._observed[structure]
        keys = self._selected(structure, batch)
        slot = (structure, None if len(keys) == len(known) else batch)  # one fit where there is but one batch size
        if slot not in self._fits:
            self._fits[slot] = (
                _best_fit([dict(k) for k in keys], np.array([known[k] for k in keys]), structure, self.resident_bytes)
                if keys
                else None
            )
        return self._fits[slot]

    def _trusted(self, fit: _Fit, dims: Mapping[str, int]) -> bool:
        if len(self) < self._enough or not self._is_complete():
            return False
        if fit.error <= GOOD_ERROR:
            reach = 4.0
        elif fit.error <= USABLE_ERROR and fit.sizes >= self._patience * max(1, len(fit.basis.dims)):
            reach = 1.25
        else:
            return False
        return all(fit.low[name] / reach <= value <= fit.high[name] * reach for name, value in dims.items())

    def _is_complete(self) -> bool:
        """Whether the latest path makes every call that any path was seen to make."""
        latest = self._latest
        return latest is not None and all(other.calls_made <= latest.calls_made for other in self._observed)

    def seconds_per_flop(self) -> float:
        """Rate of recomputation on this device, over all that was measured; a guess before."""
        if self._rate is None:
            seconds = flops = 0.0
            for structure, known in self._observed.items():
                regions = [call for call in structure.calls if call.region]
                for values in known.values():
                    seconds += float(values[[call.seconds for call in regions]].sum())
                    flops += float(values[[call.flops for call in regions]].sum())
            self._rate = seconds / flops if flops and seconds else 1e-11
        return self._rate

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, as plain data."""
        return {
            "varies": self.varies,
            "observed": [
                {
                    "structure": asdict(structure),
                    "sizes": [[list(map(list, key)), values.tolist()] for key, values in known.items()],
                }
                for structure, known in self._observed.items()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another estimator learnt."""
        self.varies = bool(state.get("varies", False))
        for entry in state["observed"]:
            structure = _structure(entry["structure"])
            for key, values in entry["sizes"]:
                self.add({name: int(value) for name, value in key}, structure, np.array(values, dtype=np.float64))


def _structure(data: Mapping[str, Any]) -> Structure:
    return Structure(
        units=tuple(data["units"]),
        parents=tuple(data["parents"]),
        calls=tuple(CallShape(**call) for call in data["calls"]),
        positions=tuple(Position(**position) for position in data["positions"]),
        loose=tuple(LooseShape(**{**loose, "holders": tuple(loose["holders"])}) for loose in data["loose"]),
        batch=data["batch"],
        columns=data["columns"],
        old_gradient_bytes=data.get("old_gradient_bytes"),
        lean=tuple(
            LeanShape(**{**lean, "positions": tuple(map(tuple, lean["positions"]))}) for lean in data.get("lean", ())
        ),
    )


def _best_fit(
    sizes: Sequence[Mapping[str, int]], values: NDArray[np.float64], structure: Structure, resident_bytes: int
) -> _Fit:
    """The simplest basis that predicts every size from the others, or else the one that does so best."""
    dims, relations = varying_dims(sizes)
    candidates = bases(dims, sizes)
    best, basis, truth = _UNCHECKED, candidates[0], structure.summary(values)
    for candidate in candidates:
        design = np.array([candidate.features(size) for size in sizes])
        check = _left_out(design, values, truth, structure, resident_bytes)
        if check.error < best.error:
            best, basis = check, candidate
        if check.error <= EXACT_ERROR:
            break
    design = np.array([basis.features(size) for size in sizes])
    names = sizes[0].keys()
    return _Fit(
        basis,
        _solve(design, values),
        best.error,
        len(sizes),
        {name: min(size[name] for size in sizes) for name in names},
        {name: max(size[name] for size in sizes) for name in names},
        _doubtful(best, values, truth, structure, resident_bytes),
        relations,
    )


class _Check(NamedTuple):
    """What came of predicting sizes from the others.

    Attributes:
        error: The largest error, as a share of the size's peak.
        checked: Indices of the sizes that could be predicted.
        predicted: Shape (checked, columns).
    """

    error: float
    checked: Sequence[int]
    predicted: NDArray[np.float64]


_UNCHECKED = _Check(float("inf"), (), np.zeros((0, 0)))


def _left_out(
    design: NDArray[np.float64],
    values: NDArray[np.float64],
    truth: NDArray[np.float64],
    structure: Structure,
    resident_bytes: int,
) -> _Check:
    """Predict each size from the others; `truth` is the summary of the values."""
    # Two more sizes than unknowns: one to check the fit, one more because the checks share the others.
    # Sizes that a basis cannot tell apart (a portrait and its landscape) must not vouch for each other.
    features = design.shape[1]
    if len(design) < features + (1 if features == 2 else 2):
        return _UNCHECKED
    distinct, group = np.unique(design.round(9), axis=0, return_inverse=True)
    group = group.reshape(-1)
    few = features == 2 and len(distinct) == 3  # three sizes on one line, if they are on it exactly
    if (len(distinct) < features + 2 and not few) or np.linalg.matrix_rank(distinct) < features:
        return _UNCHECKED
    # What a fit without some rows misses them by follows from the fit with them (its hat matrix), so one is enough.
    orthogonal = np.linalg.qr(design)[0]
    hat = orthogonal @ orthogonal.T
    residuals = values - orthogonal @ (orthogonal.T @ values)
    checked, missing = [], []
    for left_out in range(len(distinct)):
        held, rest = np.flatnonzero(group == left_out), group != left_out
        if np.linalg.matrix_rank(design[rest]) < features:
            continue
        checked.extend(held.tolist())
        free = np.eye(len(held)) - hat[np.ix_(held, held)]
        if np.linalg.eigvalsh(free)[0] > LEVERAGE:
            missing.append(np.linalg.solve(free, residuals[held]))
        else:
            coefficients = np.linalg.lstsq(design[rest], values[rest], rcond=None)[0]
            missing.append(values[held] - design[held] @ coefficients)
    if len(missing) < 2:
        return _UNCHECKED
    predicted = values[checked] - np.concatenate(missing)
    missed = np.abs(structure.summary(predicted) - truth[checked])
    whole = truth[checked, :1] + resident_bytes
    error = float((np.concatenate([missed[:, :2], missed[:, 2:].sum(axis=1, keepdims=True)], axis=1) / whole).max())
    # A size without which the fit is undetermined cannot be checked; only an exact fit is believed regardless.
    believed = (len(checked) == len(design) and not few) or error < EXACT_ERROR
    return _Check(error, checked, predicted) if believed else _UNCHECKED


def _doubtful(
    check: _Check,
    values: NDArray[np.float64],
    truth: NDArray[np.float64],
    structure: Structure,
    resident_bytes: int,
) -> frozenset[str]:
    """Grades of lean saves whose peaks were missed by more than the rest; only of the fit chosen: it takes long."""
    if not structure.grades or not check.checked:
        return frozenset(structure.grades)
    rows = check.checked
    missed = np.abs(structure.lean_peaks(check.predicted) - structure.lean_peaks(values[rows]))
    errors = (missed / (truth[rows, :1] + resident_bytes)).max(axis=0)
    return frozenset(g for g, e in zip(structure.grades, errors, strict=True) if e > max(LEAN_ERROR, check.error))


def _solve(design: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares per column; non-negative (so that extrapolation is monotone) where that fits as well."""
    free: NDArray[Any] = np.linalg.lstsq(design, values, rcond=None)[0]
    scale = np.abs(values).max(axis=0)
    negative = np.flatnonzero((free < -1e-9 * scale).any(axis=0))
    if negative.size:
        # What scikit-learn's LinearRegression(positive=True) calls: that one takes a quarter of a second to import, and
        # five times as long, in the middle of training. Units that are alike have columns that are equal.
        targets, which = np.unique(values[:, negative], axis=1, return_inverse=True)
        bound = np.array([nnls(design, target)[0] for target in targets.T]).T[:, which.reshape(-1)]
        worse = np.abs(design @ bound - values[:, negative]).max(axis=0) > 1e-4 * scale[negative]
        free[:, negative] = np.where(worse, free[:, negative], bound)
    return free
