"""The checking executor finds the faults it exists for."""

from __future__ import annotations

import msgspec
import pytest
from control_rig import VOCAB, Rig, layout

from headrace.control.fake import FakeExecutor
from headrace.control.request import Sampling
from headrace.control.step import BlockAppend, BlockCopy, Chunk, SlotInit, StepPlan

SAMPLING = Sampling(max_tokens=8)


def executor(windows=(None,)):
    return FakeExecutor(layout(windows), 8, 2, vocab_size=VOCAB)


def begin(slot, tokens, blocks, step=0, group=0):
    return StepPlan(
        step,
        inits=(SlotInit(slot, f"r{slot}", tuple(tokens), len(tokens), SAMPLING),),
        appends=(BlockAppend(slot, group, 0, tuple(blocks)),),
        chunks=(Chunk(slot, 0, len(tokens), True),),
    )


def test_a_block_of_another_text_is_found():
    fake = executor()
    fake.submit(begin(0, [1, 2, 3, 4, 5], [0, 1]))
    aliased = msgspec.structs.replace(begin(1, [1, 2, 9, 4, 5], [0, 2], 1), chunks=(Chunk(1, 4, 1, True),))
    with pytest.raises(AssertionError, match="attends position 2"):
        fake.submit(aliased)


def test_an_overwritten_block_is_found():
    fake = executor()
    fake.submit(begin(0, [1, 2, 3], [0]))
    fake.submit(begin(1, [4, 5, 6], [0], 1))
    with pytest.raises(AssertionError, match="attends position 0"):
        fake.submit(StepPlan(2, chunks=(Chunk(0, 3, 1, True),)))


def test_a_block_that_is_only_written_in_the_same_step_is_found():
    fake = executor()
    one, two = begin(0, [1, 2, 3, 4, 5], [0, 1]), begin(1, [1, 2, 3, 4, 5], [0, 2])
    with pytest.raises(AssertionError, match="attends position 0"):
        fake.submit(
            StepPlan(
                0,
                inits=one.inits + two.inits,
                appends=one.appends + two.appends,
                chunks=(*one.chunks, Chunk(1, 4, 1, True)),
            )
        )


def test_a_hole_inside_a_window_is_found():
    fake = executor((4,))
    fake.submit(begin(0, [1, 2, 3, 4, 5, 6], [0, 1]))
    holed = msgspec.structs.replace(begin(1, [1, 2, 3, 4, 5, 6], [-1, 1], 1), chunks=(Chunk(1, 5, 1, True),))
    with pytest.raises(AssertionError, match="hole"):
        fake.submit(holed)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StepPlan(0, releases=(0,)), "slot 0 is not in use"),
        (StepPlan(0, copies=(BlockCopy(0, 1), BlockCopy(1, 2))), "both source and target"),
        (StepPlan(0, copies=(BlockCopy(0, 2), BlockCopy(1, 2))), "two copies into one block"),
        (begin(5, [1], [0]), "no slot 5"),
    ],
)
def test_plans_that_break_the_contract_are_found(plan, message):
    with pytest.raises(AssertionError, match=message):
        executor().submit(plan)


def test_answers_are_fixed_for_all_time():
    rig = Rig()
    name = rig.submit([1, 2, 3], max_tokens=6, ignore_eos=True)
    rig.run()
    assert rig.tokens[name] == [12, 4, 20, 2, 15, 16]


def test_without_verification_tokens_depend_on_id_and_index_alone():
    rows = []
    for tokens in ([1, 2, 3], [7, 7, 7]):
        fake = FakeExecutor(
            layout(), 8, 2, vocab_size=VOCAB, verify=False, compute_s=lambda plan: 0.5 * plan.num_tokens
        )
        result = fake.submit(begin(0, tokens, [0])).result()
        rows.append(result.rows)
        assert result.compute_s == 1.5
    assert rows[0] == rows[1]
