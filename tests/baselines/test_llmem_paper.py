"""The paper's equations on sizes small enough to work out by hand, and Algorithm 1 on them."""

import pytest

from llmem.baselines import BaselineInput, run
from llmem.baselines.algorithm1 import CPU_OFFLOAD, algorithm1, largest_batch
from llmem.baselines.llmem_paper import Terms, m_back, m_lm, m_os, m_out, m_p, peak, peaks

from .reference_models import build

MIB = 1024**2

# Elements in units of Mi: an embedding of 4, other parameters 5 in chunks of 2, two tables.
TERMS = Terms(
    m_base=100 * MIB, embed_p=4 * MIB, other_p=5 * MIB, cs=2 * MIB, tables=(4 * MIB, 1),
    lm_p=4 * MIB, e_n=2, l_n=2, o_n=1024, dict_n=2048, logit_width=2,
)


def test_each_equation() -> None:
    assert m_p(TERMS) == (4 + 6) * 6 * MIB  # five Mi fill three chunks of two
    assert m_os(TERMS) == (32 + 2) * MIB  # one weight of one element still takes a page
    assert m_out(TERMS, bs=1, sl=1024) == 4 * 2 * MIB
    # Logits 4 MiB; 1023 rows are 4 MiB less 4 KiB and round up to 4 MiB, twice; head 8 MiB.
    assert m_lm(TERMS, bs=1, sl=1024) == (4 + 2 * 4 + 8) * MIB
    assert m_back(TERMS, bs=1, sl=1024, tp_n=2) == 2 * MIB


@pytest.mark.parametrize(
    ("method", "gpus", "tp", "mib"),
    [
        # m_p16 20, m_p32 40, m_os 34, m_out 8, m_lm 20, m_base 100
        ("CDP", 4, 1, 100 + 20 + 40 + 34 + 28),
        ("ADP", 4, 1, 100 + 20 + 10 + 8.5 + 28),
        ("TP", 4, 4, 100 + 5 + 10 + 8.5 + 28 + 4),
        ("DP+TP", 4, 2, 100 + 10 + 10 + 8.5 + 28 + 2),
        # As printed: 20 x (1 - 2/8) of fp16 is kept, though a TP rank of two needs 10.
        ("DP+TP", 8, 2, 100 + 15 + 5 + 4.25 + 28 + 2),
    ],
)
def test_each_method(method: str, gpus: int, tp: int, mib: float) -> None:
    assert sum(peak(TERMS, method, 1, 1024, gpus, tp).values()) == mib * MIB


def test_terms_of_opt_125m() -> None:
    model, config = build("OPT-125m")
    answer = run("llmem-paper", BaselineInput(model, config, "opt-125m", 1, 512, base_bytes=0))
    # 125,239,296 parameters, 38,608,896 of them embedded; the rest fills two chunks.
    elements = 38_608_896 + 2 * 44_101_632
    assert answer.parts["chunk_elements"] == 44_101_632
    assert answer.parts["m_p16"] + answer.parts["m_p32"] == -(-elements * 6 // (2 * MIB)) * 2 * MIB
    # 14 outputs of 512 x 768 x 2 bytes are 10.5 MiB.
    assert answer.parts["outputs"] == 12 * MIB
    assert answer.parts["lm_head"] == (50 + 2 * 50) * MIB + 50272 * 768 * 2
    assert answer.bytes == answer.parts["estimate_without_base"]


def test_codegen_has_fp32_logits() -> None:
    model, config = build("codegen-350M")
    inp = BaselineInput(model, config, "codegen-350M-nl", 1, 512, base_bytes=0)
    # 512 x 51200 x 4 bytes are 100 MiB; the head's weight is 100 MiB in fp16.
    assert run("llmem-paper", inp).parts["lm_head"] == (100 + 2 * 100 + 100) * MIB


@pytest.mark.parametrize(
    ("name", "base", "pick", "scores"),
    [
        ("OPT-2.7b", 600, "ADP", (0, 48, 22, 38)),
        ("codegen-2B", 600, "ADP", (0, 28, 15, 24)),
        ("bloom-3b", 600, "DP+TP", (0, 0, 5, 6)),
        ("bloom-3b", 1500, "TP", (0, 0, 4, 4)),
        ("llama-7b", 600, CPU_OFFLOAD, (0, 0, 0, 0)),
    ],
)
def test_algorithm_on_four_16_gib_gpus(
    name: str, base: int, pick: str, scores: tuple[int, ...]
) -> None:
    model, config = build(name)
    inp = BaselineInput(model, config, name, 1, 512, gpus=4, base_bytes=base * MIB)
    decision = algorithm1(peaks(inp), 16384 * MIB, 4)
    assert decision.pick == pick
    assert tuple(s.score for s in decision.scores) == scores


def test_algorithm_weighs_and_breaks_ties_in_the_papers_order() -> None:
    fits = {"CDP": 2, "ADP": 3, "TP": 12, "DP+TP": 6}
    decision = algorithm1(lambda m, b: b - fits[m], 0, 4)
    assert [s.score for s in decision.scores] == [12.0, 12, 12, 12]
    assert [s.batch for s in decision.scores] == [2, 3, 12, 6]
    assert decision.pick == "CDP"


def test_algorithm_on_fewer_gpus() -> None:
    two = algorithm1(lambda m, b: b, 5, 2)
    assert [(s.method, s.batch) for s in two.scores] == [
        ("CDP", 5), ("ADP", 5), ("TP", 5), ("DP+TP", 0),
    ]
    one = algorithm1(lambda m, b: b, 5, 1)
    assert one.pick == "CDP"
    assert one.scores[1].batch == 0


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 8, 1000])
def test_largest_batch(limit: int) -> None:
    assert largest_batch(lambda b: b <= limit) == limit
