"""Meters: exact against known allocations, against each other, and silent."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd.profiler import profile

from lightning_mimose.measure import scratch
from lightning_mimose.measure.interval import MOST_TOPS, Climb, Interval
from lightning_mimose.measure.meter import Meter, has_memory_counters, make_meter
from lightning_mimose.measure.meters.accelerator import AcceleratorMeter
from lightning_mimose.measure.meters.dispatch import DispatchMeter
from lightning_mimose.measure.meters.profiler import ProfilerMeter

CPU = torch.device("cpu")
KIB = 1024
METERS = pytest.mark.parametrize("make", [ProfilerMeter, DispatchMeter])


def block(kibibytes: int) -> torch.Tensor:
    """A tensor of so many KiB."""
    return torch.empty(kibibytes * KIB, dtype=torch.uint8)


def conv_step(channels: int = 8, side: int = 24) -> Callable[[], None]:
    """A forward and backward with convolutions, whose kernels need scratch memory."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels, 3)
    )
    image = torch.randn(4, 3, side, side)

    def step() -> None:
        for parameter in net.parameters():
            parameter.grad = None
        net(image).pow(2).mean().backward()

    return step


def peak(meter: Meter, step: Callable[[], object]) -> int:
    """The peak of a step by a meter."""
    meter.start()
    try:
        step()
    finally:
        intervals = meter.stop()
    return max(interval.peak_bytes for interval in intervals)


@METERS
def test_a_known_sequence_of_allocations_is_measured_to_the_byte(make: Callable[[], Meter]) -> None:
    """Every mark opens an interval with the level at that moment, and the peaks until the next and after a free."""
    meter = make()
    meter.start()
    a = block(10)
    meter.mark()
    b = block(30)
    del b
    meter.mark()
    del a
    c = block(5)
    meter.mark()
    del c
    intervals = meter.stop()
    assert intervals == [
        Interval(0, 10 * KIB),
        Interval(10 * KIB, 40 * KIB, 10 * KIB),
        Interval(10 * KIB, 10 * KIB, 5 * KIB),
        Interval(5 * KIB, 5 * KIB, 0),
    ]


@METERS
def test_local_maxima_are_told_in_order(make: Callable[[], Meter]) -> None:
    """Each is a level from which memory goes, or the last one; a level at the start counts where it goes at once."""
    meter = make()
    meter.start()
    a = block(10)
    meter.mark()
    del a
    b = block(3)
    c = block(4)
    del b
    d = block(2)
    meter.mark()
    meter.mark()
    del c, d
    assert [interval.tops_bytes for interval in meter.stop()] == [
        (10 * KIB,),
        (10 * KIB, 7 * KIB, 6 * KIB),
        (6 * KIB,),
        (6 * KIB,),
    ]


def test_intervals_with_very_many_maxima_tell_none() -> None:
    """Their peak is what is known of them."""
    climb = Climb()
    for _ in range(MOST_TOPS):
        climb.changes(2)
        climb.changes(-1)
    assert len(climb.closed().tops_bytes) == MOST_TOPS
    for _ in range(MOST_TOPS + 1):
        climb.changes(1)
        climb.changes(-1)
    interval = climb.closed()
    assert interval.tops_bytes == ()
    assert interval.peak_bytes == MOST_TOPS + 1


@METERS
def test_views_and_in_place_results_are_not_counted_again(make: Callable[[], Meter]) -> None:
    """A storage counts once, however many tensors look at it."""
    meter = make()
    meter.start()
    a = torch.zeros(4 * KIB)
    b = a.view(4, KIB)[1:].t()
    b.neg_()
    assert meter.stop() == [Interval(0, 16 * KIB)]


@METERS
def test_what_is_older_than_the_start_is_told_from_what_is_not(make: Callable[[], Meter]) -> None:
    """By when it was made, not by its address: what is made where something older was is not older."""
    old, short = block(64), block(48)
    meter = make()
    meter.start()
    meter.ask(old.untyped_storage())
    new = block(32)
    meter.ask(new.untyped_storage())
    meter.mark()
    meter.ask(short.untyped_storage())
    del short
    for again in [block(48) for _ in range(3)]:
        meter.ask(again.untyped_storage())
    meter.ask(old[:10].untyped_storage())
    meter.stop()
    assert meter.older == [True, False, True, False, False, False, True]


def test_the_profiler_meter_does_not_lower_the_curve_for_old_memory() -> None:
    """Freeing what was allocated before the start leaves the curve at what was allocated since."""
    old = block(100)
    meter = ProfilerMeter()
    meter.start()
    a = block(10)
    del old
    meter.mark()
    b = block(1)
    del a, b
    assert meter.stop() == [Interval(0, 10 * KIB), Interval(10 * KIB, 11 * KIB, KIB)]
    assert not meter.sees_old_frees


@METERS
def test_what_is_replaced_counts_once(make: Callable[[], Meter]) -> None:
    """What was followed lowers the curve when it goes; meanwhile both are there, and nothing is kept alive by that."""
    weight, lost = nn.Parameter(block(10), requires_grad=False), block(3)
    old = weakref.ref(weight.untyped_storage())
    meter = make()
    meter.start()
    meter.follow([weight.untyped_storage(), weight.data.view(2, -1).untyped_storage(), lost.untyped_storage()])
    weight.data = weight.data.clone()
    assert old() is None
    meter.mark()
    a = block(5)
    weight.data = weight.data.clone()  # what was made since the start goes as it always does
    meter.mark()
    del lost, a
    assert meter.stop() == [
        Interval(0, 10 * KIB, 0),
        Interval(0, 15 * KIB, 5 * KIB),
        Interval(5 * KIB, 5 * KIB, 2 * KIB),
    ]
    assert not meter.sees_old_frees


@METERS
def test_what_goes_after_the_stop_is_not_followed(make: Callable[[], Meter]) -> None:
    old = block(10)
    meter = make()
    meter.start()
    meter.follow([old.untyped_storage()])
    measured = meter.stop()
    assert weakref.getweakrefcount(old.untyped_storage()) == 0
    del old
    assert measured == [Interval(0, 0)]


def test_both_meters_agree_on_a_convolutional_net() -> None:
    """The dispatch meter learns what kernels use besides their results, so it equals the profiler to the byte."""
    step = conv_step()
    step()
    assert peak(DispatchMeter(), step) == peak(ProfilerMeter(), step)


def test_both_meters_agree_on_a_new_size() -> None:
    """The scratch memory of a shape that was not met before is measured when it is met."""
    peak(DispatchMeter(), conv_step(side=12))
    step = conv_step(channels=12, side=20)
    step()
    assert peak(DispatchMeter(), step) == peak(ProfilerMeter(), step)


def test_convolutions_without_scratch_say_nothing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a single pixel need none in any size, and others do, of the same type and layout."""
    monkeypatch.setattr(scratch, "_known", {})
    monkeypatch.setattr(scratch, "_clean", {})
    pointwise = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1))
    for side in (8, 9, 10, 11):
        peak(DispatchMeter(), lambda side=side: pointwise(torch.randn(2, 4, side, side)).sum().backward())
    step = conv_step(channels=6, side=22)
    step()
    assert peak(DispatchMeter(), step) == peak(ProfilerMeter(), step)


def test_small_products_without_scratch_say_nothing_of_larger_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 oneDNN multiplies matrices, in memory of its own, but the smallest ones."""
    monkeypatch.setattr(scratch, "_known", {})
    monkeypatch.setattr(scratch, "_clean", {})

    def taken(rows: int, width: int) -> int:
        given = torch.ones(rows, width, dtype=torch.bfloat16), torch.ones(width, width, dtype=torch.bfloat16)
        return scratch.scratch_bytes(torch.ops.aten.mm.default, given, {}, given)

    alone = taken(128, 64)
    scratch._known.clear()
    scratch._clean.clear()
    for rows in (1, 2, 3, 4, 5):
        taken(rows, 4)
    assert taken(128, 64) == alone


@pytest.mark.parametrize("threads", [1, 2])
def test_both_meters_agree_whatever_the_number_of_threads(threads: int) -> None:
    """A backward of wide convolutions sums up weights' gradients in as many buffers as it has threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, weight = torch.randn(2, 32, 119, requires_grad=True), torch.randn(32, 16, 16, requires_grad=True)

        def step() -> None:
            nn.functional.conv1d(x, weight, padding=8, groups=2).sum().backward()
            x.grad = weight.grad = None

        step()
        assert peak(DispatchMeter(), step) == peak(ProfilerMeter(), step)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_both_meters_agree_on_attention_whose_kernel_may_draw_random_numbers(dropout: float) -> None:
    """Its scratch is a good part of what it takes; to look at it draws nothing that the training would draw."""
    query, key = torch.randn(2, 2, 24, 16, requires_grad=True), torch.randn(2, 2, 84, 16)
    drawn = []

    def step() -> None:
        torch.manual_seed(3)
        attended = nn.functional.scaled_dot_product_attention(query, key, key, dropout_p=dropout)
        drawn.append(torch.cat([attended.detach().flatten(), torch.rand(3)]))

    assert peak(ProfilerMeter(), step) == peak(DispatchMeter(), step)
    assert torch.equal(*drawn)


def test_the_dispatch_meter_changes_no_result() -> None:
    """Running operators once more to learn their scratch draws no random number and writes no buffer."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
    image = torch.randn(2, 3, 9, 9)
    states = []
    for meter in (None, DispatchMeter()):
        torch.manual_seed(0)
        net[1].reset_running_stats()
        if meter is not None:
            meter.start()
        out = net(image).sum()
        if meter is not None:
            meter.stop()
        states.append((out.detach().clone(), net[1].running_mean.clone(), net[1].num_batches_tracked.clone()))
    assert all(torch.equal(x, y) for x, y in zip(*states, strict=True))


def allocations(session: profile) -> list[int]:
    """The sizes of the allocations that a profiler session saw, in order.

    Without those of a few bytes: under any dispatch mode Python numbers become tensors.
    """
    found, stack = [], list(session.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.name == "[memory]":
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    return [size for _, size in sorted(found) if size > 16]


def test_what_fsdp_gathers_is_seen_to_come_and_go() -> None:
    """Its storages last; it fills them by a copy and empties them without an operator."""
    import torch.distributed.fsdp

    whole, parts = torch.ones(2, 300), [torch.empty(2, 100), torch.empty(2, 200)]
    for part in parts:
        part.untyped_storage().resize_(0)
    meter = DispatchMeter()
    meter.start()
    for part in parts:
        part.untyped_storage().resize_(part.numel() * 4)
    torch.ops.fsdp.split_with_sizes_copy(whole, [100, 200], 1, out=parts)
    meter.mark()
    for part in parts:
        part.untyped_storage().resize_(0)
    meter.mark()
    assert [interval.level_bytes for interval in meter.stop()] == [0, 2400, 0]


def test_a_profiler_of_the_users_own_is_not_disturbed() -> None:
    """While one runs the dispatch meter is chosen, and the user's memory events are those of an unmetered step."""
    step = conv_step()
    peak(DispatchMeter(), step)
    seen = []
    for metered in (False, True):
        with profile(use_kineto=True, profile_memory=True) as session:
            assert isinstance(make_meter(CPU), DispatchMeter)
            if metered:
                peak(DispatchMeter(), step)
            else:
                step()
        seen.append(allocations(session))
    assert seen[0] == seen[1]


def test_a_first_meeting_of_operators_under_a_users_profiler_is_not_seen_by_it() -> None:
    """The run that measures an operator's scratch happens out of the user's profiler's sight."""
    step = conv_step(channels=10, side=18)
    with profile(use_kineto=True, profile_memory=True) as session:
        metered = peak(DispatchMeter(), step)
    with profile(use_kineto=True, profile_memory=True) as plain:
        step()
    assert allocations(session) == allocations(plain)
    assert metered == peak(ProfilerMeter(), step)


def test_the_profiler_meter_is_chosen_on_cpu() -> None:
    """Where no profiler runs the exact meter is used, and CPU always has memory counters."""
    assert isinstance(make_meter(CPU), ProfilerMeter)
    assert has_memory_counters(CPU)


def test_the_profiler_meter_records_no_operators() -> None:
    """They are most of what a session records, and what it costs."""
    meter = ProfilerMeter()
    assert peak(meter, conv_step()) > 0
    results = meter._profile.kineto_results
    assert results is not None
    assert not [event.name() for event in results.events() if event.name().startswith("aten::")]


def test_our_profiler_sessions_are_silent(capfd: pytest.CaptureFixture[str]) -> None:
    """Neither Kineto nor c10 writes a line, even if memory from before the session is freed in it."""
    old = [block(10) for _ in range(3)]
    for _ in range(2):
        meter = ProfilerMeter()
        meter.start()
        old.pop()
        meter.mark()
        meter.stop()
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_a_meter_may_be_stopped_after_an_exception() -> None:
    """A session that was interrupted leaves no profiler running, and another one may follow."""
    meter = ProfilerMeter()
    meter.start()
    try:
        raise RuntimeError
    except RuntimeError:
        meter.stop()
    assert not torch.autograd._profiler_enabled()
    assert peak(ProfilerMeter(), lambda: block(3).zero_()) == 3 * KIB


@pytest.mark.gpu
def test_the_accelerators_counters_measure_to_their_granularity() -> None:
    """A known sequence on the device, in blocks of the allocator's granularity."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    meter = AcceleratorMeter(device)
    meter.start()
    a = torch.empty(1 << 21, dtype=torch.uint8, device=device)
    meter.mark()
    b = torch.empty(1 << 22, dtype=torch.uint8, device=device)
    del a, b
    intervals = meter.stop()
    assert intervals == [Interval(0, 1 << 21), Interval(1 << 21, 3 << 21)]
    assert meter.allocator is not None
    assert meter.allocator.reserved_bytes >= meter.allocator.held_bytes >= 3 << 21
