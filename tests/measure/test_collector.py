"""The collector: what it says a call saved and computed is what independent counters say."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lightning_mimose import Mimose
from lightning_mimose.measure.call import RNG_STATE_BYTES
from lightning_mimose.measure.collector import StepRecorder
from lightning_mimose.measure.curve import MOST_ENDS
from lightning_mimose.measure.gradients import GradientLedger
from lightning_mimose.measure.observe import observe
from lightning_mimose.measure.saved import resident_tensors, saved_in_graph
from lightning_mimose.measure.trace import StepTrace
from lightning_mimose.measure.unseen import peaks_kept
from lightning_mimose.predict.shapes import END_OF
from lightning_mimose.units import find_units
from tests.helpers.counting import flops
from tests.helpers.hub import HUB
from tests.helpers.models import Block, TinyDict, TinyNested, TinyText, text_batch
from tests.helpers.recording import model_loss, patched, recorded, shelter_of
from tests.helpers.rounds import Collecting, Looking, Writing, loss_of, text_of


def storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    """The storages of the tensors in a tree, held so that no address is used twice."""
    found = (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return {storage.data_ptr(): storage for storage in found}


class Count:
    """What each module's forward saved, was given and returned, by hooks of this test's own."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.saved: dict[str, dict[int, torch.UntypedStorage]] = {name: {} for name in [*names, ""]}
        self.given: dict[str, dict[int, torch.UntypedStorage]] = {}
        self.returned: dict[str, dict[int, torch.UntypedStorage]] = {}
        self._inside = ""
        self._handles = []
        for name in names:
            module = model.get_submodule(name)
            self._handles.append(module.register_forward_pre_hook(self._enter(name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave(name)))

    def _enter(self, name: str) -> Any:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._inside = name
            self.given[name] = storages((args, kwargs))

        return enter

    def _leave(self, name: str) -> Any:
        def leave(_: nn.Module, args: Any, out: Any) -> None:
            self._inside = ""
            self.returned[name] = storages(out)

        return leave

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts one saved tensor."""
        self.saved[self._inside].update(storages(tensor))
        return tensor

    def bytes_of(self, name: str, resident: Mapping[int, Any]) -> int:
        """Bytes that only this module saved, and that were neither given to it nor handed on."""
        others = {key for other, saved in self.saved.items() if other != name for key in saved}
        passed = self.given[name].keys() | self.returned[name].keys()
        mine = self.saved[name].items()
        return sum(s.nbytes() for key, s in mine if key not in others | passed | resident.keys())


def independently(model: nn.Module, batch: Mapping[str, torch.Tensor], names: list[str]) -> dict[str, int]:
    """Saved bytes of every named module in an ordinary forward."""
    from lightning_mimose.actions.caches import CacheSwitch

    caches = CacheSwitch()
    caches.off(model)
    count = Count(model, names)
    with saved_tensors_hooks(count.pack, lambda tensor: tensor):
        loss = model_loss(model, batch)
    resident = storages([*model.parameters(), *model.buffers(), list(batch.values())])
    found = {name: count.bytes_of(name, resident) for name in names}
    del loss
    for handle in count._handles:
        handle.remove()
    caches.restore()
    return found


def own_saved(trace: StepTrace, unit: str) -> int:
    """Bytes that a region saved and nobody else holds, by the recorder's account."""
    region = next(call for call in trace.calls if call.unit == unit)
    mine: dict[int, int] = {}
    held = set(region.inputs) | set(region.outputs) | trace.saved_between
    for call in trace.calls:
        if call.within(region):
            mine |= call.saved
        else:
            held |= call.saved.keys()
    return sum(size for number, size in mine.items() if number not in held)


@pytest.mark.parametrize("name", HUB)
def test_saved_bytes_equal_an_independent_count(name: str) -> None:
    """In the recomputation as many bytes are counted as hooks count in a plain forward, to the byte."""
    make, batch_of = HUB[name]
    model, batch = make(), batch_of(2, 32)
    names = [unit.name for unit in find_units(model) if unit.shelter]
    expected = independently(model, batch, names)
    trace = recorded(model, batch)
    assert {name: own_saved(trace, name) for name in names} == expected
    assert sum(expected.values()) > 0


@pytest.mark.parametrize("name", HUB)
def test_operations_equal_those_of_a_recomputation(name: str) -> None:
    """Every call of every unit, nested ones too: what `FlopCounterMode` counts more when just this is recomputed."""
    make, batch_of = HUB[name]
    model, batch = make(), batch_of(2, 32)
    trace = recorded(model, batch)

    def step(actions: dict[str, str]) -> int:
        with patched(model) as (_, session):
            session.arm(actions, None)
            return flops(lambda: model_loss(model, batch).backward())

    plain = step({})
    # The model's blocks are alike: the first of each kind with everything inside it.
    calls = {type(model.get_submodule(call.unit)): call for call in reversed(trace.calls)}
    for call in calls.values():
        assert call.flops == step({call.unit: "recompute"}) - plain, call.key


def test_calls_are_recorded_in_forward_order_with_their_parents() -> None:
    """Every call of every unit, nested ones below the call they are in; a shared module's calls are numbered."""
    model = TinyNested()
    trace = recorded(model, text_batch())
    assert [call.key for call in trace.calls if call.unit == "shared"] == ["shared", "shared#1"]
    assert [call.unit for call in trace.calls if call.parent is None] == [
        unit for stage in ("stages.0", "stages.1") for unit in (*(f"{stage}.{i}" for i in (0, 1)), "shared")
    ]
    mlp = [call for call in trace.calls if call.unit.endswith(".mlp")]
    assert all(call.parent is not None and call.parent.unit == call.unit.removesuffix(".mlp") for call in mlp)
    starts = [call.marks["in"] for call in trace.calls]
    assert starts == sorted(starts)


def test_marks_of_a_call_come_in_order() -> None:
    """Its forward, its backward, its recomputation: for a region and for what is nested in it."""
    trace = recorded(TinyText(), text_batch())
    for call in trace.calls:
        marks = call.marks
        assert marks["in"] < marks["out"] < marks["again"] < marks["again_out"]
        assert marks["out"] < marks["backward"]
    regions = [call for call in trace.calls if call.parent is None]
    backward = [call.marks["backward"] for call in regions]
    assert backward == sorted(backward, reverse=True)


def test_every_mark_has_its_interval_and_peaks_are_at_least_levels() -> None:
    """The step is cut without gaps, from its start to its end."""
    trace = recorded(TinyText(), text_batch())
    assert len(trace.marks) == len(trace.intervals)
    assert (trace.marks[0].owner, trace.marks[0].name) == ("step", "start")
    assert (trace.marks[-1].owner, trace.marks[-1].name) == ("step", "end")
    assert all(interval.peak_bytes >= interval.level_bytes >= 0 for interval in trace.intervals)


def test_a_recorded_step_has_the_gradients_of_a_plain_one() -> None:
    """Dropout, dictionaries, counting: nothing changes what is learnt."""
    model, batch = TinyDict(), text_batch()
    torch.manual_seed(0)
    model_loss(model, batch).backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    torch.manual_seed(0)
    recorded(model, batch)
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True))


def test_the_random_state_ends_where_a_plain_step_leaves_it() -> None:
    """Recomputations give back the generator as they found it."""
    model, batch = TinyText(), text_batch()
    ends = []
    for run in (lambda: model_loss(model, batch).backward(), lambda: recorded(model, batch)):
        torch.manual_seed(0)
        run()
        ends.append(torch.get_rng_state())
    assert torch.equal(*ends)


def test_inputs_leave_out_parameters_and_the_batch() -> None:
    """What is resident is no activation, wherever it is handed to a unit."""

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(4, 4))
            self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x).sum() + self.body(self.table).sum()

    model, x = Given(), torch.randn(3, 4)
    trace = recorded(model, x, ["body"], lambda m, b: m(b))
    assert [call.inputs for call in trace.calls] == [{}, {}]


def test_what_a_unit_returned_is_known_in_forward_and_in_its_recomputation() -> None:
    """The numbers of storages differ, since these are two tensors; their order is the same."""
    trace = recorded(TinyText(layers=1), text_batch())
    for call in trace.calls:
        assert len(call.returned) == len(call.outputs) == 1


def test_who_holds_an_output_is_noticed() -> None:
    """The next unit is given it, or Python holds it, or nobody does when backward begins."""

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Block(8), Block(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x) * 1.0).sum()

    calls = {call.unit: call for call in recorded(Held(), torch.randn(2, 4, 8), ["Block"], lambda m, b: m(b)).calls}
    assert not calls["a"].held
    kept = []

    def keeping(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        kept.append(model.a(batch))
        return model.b(kept[0] * 1.0).sum()

    calls = {call.unit: call for call in recorded(Held(), torch.randn(2, 4, 8), ["Block"], keeping).calls}
    assert calls["a"].held == set(calls["a"].returned)


def test_outputs_of_one_call_are_told_apart() -> None:
    """Attention probabilities are returned and forgotten, though the hidden states beside them are held."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            weights = self.inner(x).softmax(-1)
            return x * weights, weights

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Pair(), Pair()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, _ = self.a(x)
            del _
            return self.b(x)[0].sum()

    trace = recorded(Model(), torch.randn(2, 4, 8), ["Pair"], lambda m, b: m(b))
    first = trace.calls[0]
    assert first.held == {first.returned[0]}


def test_a_unit_without_a_backward_is_recorded_without_one() -> None:
    """A frozen block on data that needs no gradient: it is called, and nothing of it is run again."""
    model = TinyText(layers=2)
    for parameter in [*model.embed.parameters(), *model.layers[0].parameters()]:
        parameter.requires_grad_(False)
    calls = {call.unit: call for call in recorded(model, text_batch()).calls}
    assert "again" not in calls["layers.0"].marks
    assert "backward" not in calls["layers.0"].marks
    assert "again" in calls["layers.1"].marks


def test_a_forward_tells_of_a_region_what_its_recomputation_would() -> None:
    """Where there is none, because the result was dropped: what it saves, and its peak had it been kept."""
    model, batch = TinyText(layers=2), text_batch()

    def twice(model: nn.Module, batch: Any) -> torch.Tensor:
        probe = model(**batch).loss.detach()
        loss: torch.Tensor = model(**batch).loss + 0 * probe
        return loss

    trace = recorded(model, batch, None, twice)
    calls = {call.key: call for call in trace.calls}
    for dropped, seen in ((calls["layers.0"], calls["layers.0#1"]), (calls["layers.1"], calls["layers.1#1"])):
        inside = [seen, *(call for call in trace.calls if call.parent is seen)]
        assert dropped.is_unseen
        assert not seen.is_unseen
        own = {number: nbytes for call in inside for number, nbytes in call.saved.items()}
        assert sorted(dropped.saved.values()) == sorted(own.values())
        again = trace.intervals[seen.marks["again"] : seen.marks["again_out"]]
        peak = max(interval.peak_bytes for interval in again) - again[0].level_bytes
        kept = max(peaks_kept(trace, dropped).values()) - trace.intervals[dropped.marks["in"]].level_bytes
        assert kept - RNG_STATE_BYTES == pytest.approx(peak, abs=100)


def test_two_backward_passes_over_one_graph_are_recorded_once() -> None:
    """The second recomputation teaches nothing new, and disturbs nothing."""
    model, batch = TinyText(layers=2), text_batch()
    with patched(model) as (units, session):
        gradients = GradientLedger([(p, p.numel() * 4) for p in model.parameters()], follow=True)
        recorder = StepRecorder(torch.device("cpu"), resident_tensors(model, batch), gradients)
        session.arm(shelter_of(units), recorder)
        recorder.start()
        loss = model_loss(model, batch)
        for retain in (True, False):
            recorder.begin_backward(loss)
            loss.backward(retain_graph=retain)
        trace = recorder.stop()
        gradients.close()
    assert [sum(m.name == "again" and m.owner == unit for m in trace.marks) for unit in ("layers.0", "layers.1")] == [
        1,
        1,
    ]


def test_a_recorder_that_could_not_start_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ends the step stops it all the same; then what went wrong is told."""

    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("no meter here")

    monkeypatch.setattr("lightning_mimose.measure.curve.make_meter", fails)
    model = TinyText(layers=2)
    with Mimose(model, budget="1GB", loss_fn=model_loss) as mimose:
        with pytest.raises(ValueError, match="no meter here"):
            mimose.step(text_batch())
        monkeypatch.undo()
        mimose.step(text_batch())
    assert len(mimose.records) >= 1


def test_what_a_graph_saved_is_read_without_recomputing() -> None:
    """Tensors saved outside regions are found; a checkpointed region is not run again for it."""
    runs = []

    def region(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x.sin().cos()

    x = torch.randn(5, requires_grad=True)
    held = x.exp()
    y = torch.utils.checkpoint.checkpoint(region, held, use_reentrant=False)
    found = {t.data_ptr() for t in saved_in_graph((y * y).sum().grad_fn)}
    assert {held.data_ptr(), y.data_ptr()} <= found
    assert runs == [1]


def test_the_recorder_lets_go_of_everything() -> None:
    """After the step nothing of the graph or the model is kept alive by the trace."""
    import gc
    import weakref

    model, batch = TinyText(layers=1), text_batch()
    gone = weakref.ref(model.layers[0])
    trace = recorded(model, batch)
    del model
    gc.collect()
    assert gone() is None
    assert trace.calls


def test_somebody_elses_mode_holds_no_recomputation() -> None:
    """`FlopCounterMode` hooks every module's tensors, and so keeps the graph of every recomputation until it ends."""
    peaks = []
    for mode in (nullcontext(), FlopCounterMode(display=False)):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6)))
        with Mimose(model, budget="1GB", loss_fn=lambda module, x: module(x).pow(2).mean()) as mimose, mode:
            mimose.step(torch.randn(128, 32))
            assert mimose.records[0].sheltered
            peaks.append(mimose.records[0].measured_peak_bytes)
    assert peaks[0] == peaks[1]


class Steps(nn.Module):
    """Runs its linear layer once for every row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loop inside a unit: longer inputs save more tensors."""
        return torch.stack([self.linear(row).exp() for row in x])


@pytest.mark.parametrize("rows", [2, 7])
def test_saved_tensors_are_counted(rows: int) -> None:
    """As many as autograd's own hooks see in the block, without parameters; hooks on each of them take time."""
    model, x = nn.Sequential(Steps(), Steps()), torch.randn(rows, 4)
    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model[1](x)
    trace = recorded(model, x, ["*"], lambda model, batch: model(batch).sum())
    calls = {call.unit: call for call in trace.calls}
    assert calls["1"].tensors == sum(seen) > rows
    seen_as = observe(trace, 0)
    assert seen_as.structure.tensors(seen_as.values) == calls["0"].tensors + calls["1"].tensors


class _Cyclic(Looking):
    """Puts what a round returned besides its result into a cycle, where only Python's collector finds it."""

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory = state = self.embed(source)
        for _ in target.unbind(1)[1:]:
            state, *cycle = self.looker(state, memory)
            cycle.append(cycle)
            del cycle
            gc.collect()
        return self.head(state).square().mean()


@pytest.mark.parametrize(("model", "ended"), [(Looking, 3), (Collecting, 2), (_Cyclic, 0), (Writing, 0)])
def test_a_saved_result_that_goes_between_units_begins_an_interval(model: type[nn.Module], ended: int) -> None:
    """After each call there are as many, whatever goes there: steps are alike. None where results are not saved."""
    trace = recorded(model(), text_of(Looking, 3), ["writer" if model is Writing else "looker"], loss_of)
    ends = [index for index, mark in enumerate(trace.marks) if mark.name == END_OF]
    assert len(ends) == (0 if model is Writing else 3 * MOST_ENDS)
    assert len(trace.ended) == ended
    assert trace.ended.keys() <= set(ends)
    assert trace.ended.items() <= {(until, number) for call in trace.calls for number, until in call.gone.items()}
    for index in trace.ended:
        went = trace.intervals[index - 1].peak_bytes - trace.intervals[index].level_bytes
        assert went > 4 * 4 * 16 * 15  # the shares of one round, of every token for every other
