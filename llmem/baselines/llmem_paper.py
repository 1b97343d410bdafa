"""`llmem-paper`: equations (1) to (10) of LLMem as printed.

Source: Kim et al., "LLMem: Estimating GPU Memory Usage for Fine-Tuning Pre-Trained LLMs", IJCAI
2024, arXiv 2404.10933, sections 4.2 and 5. Symbols keep the paper's names. Where the text is
ambiguous: the chunk size ``cs`` is in elements; ``embed_p`` is the token embedding; ``other_p`` is
every other parameter of the transformer part; the head is "real-size" and appears only as ``lm_p``,
in fp16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmem.baselines import gemini_chunks, llmem_layout
from llmem.baselines.base import MIB, Answer, BaselineInput, cannot
from llmem.baselines.dims import dims_of, layer_stack

B16, B32 = 2, 4
CU_P = 2 * MIB
"""``cu_p``: the page that CUDA memory is handed out in, as the paper has it."""

LINEAR_NAMES = ("Linear", "Conv1D")

LEAVES_OUT = [
    "biases and norms in the optimizer's states",
    "the working set of the layer that is recomputed in backward",
    "runs without gradient checkpointing, LoRA, quantisation, bf16, fused losses",
    "the caching allocator: 2 MiB pages instead",
    "FSDP and ZeRO-3 free layers that the equations keep gathered",
]


@dataclass(frozen=True)
class Terms:
    """The quantities of the paper's Table 1 for one model; parameters in elements.

    ``tables`` are ``t_p`` over E and L, the weights of embeddings and linear layers of the
    transformer part; ``logit_width`` is B of equation (5), 2 or 4 bytes.
    """

    m_base: int
    embed_p: int
    other_p: int
    cs: int
    tables: tuple[int, ...]
    lm_p: int
    e_n: int
    l_n: int
    o_n: int
    dict_n: int
    logit_width: int


def terms_of(inp: BaselineInput) -> Terms:
    """Read the terms off the model's shapes."""
    model: Any = inp.model
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    params = llmem_layout.parameters(model)
    total = sum(p.numel for p in params)
    lm_p = int(head.weight.numel())
    untied = 0 if head.weight is embedding.weight else lm_p
    embed_p = int(embedding.weight.numel())
    modules = [m for m in model.modules() if m is not head and hasattr(m, "weight")]
    embeddings = [m for m in modules if llmem_layout.is_embedding(m)]
    linears = [m for m in modules if type(m).__name__ in LINEAR_NAMES]
    return Terms(
        m_base=inp.m_base,
        embed_p=embed_p,
        other_p=total - embed_p - untied,
        cs=gemini_chunks.search_chunk_size([p.numel for p in params], dp_degree=inp.dp),
        tables=tuple(int(m.weight.numel()) for m in (*embeddings, *linears)),
        lm_p=lm_p,
        e_n=len(embeddings),
        l_n=len(layer_stack(model)),
        o_n=dims_of(model, inp.config).hidden,
        dict_n=int(head.weight.shape[0]),
        logit_width=llmem_layout.logits_bytes(inp.name, inp.config),
    )


def page(size: float) -> int:
    """``ceil(size / cu_p) * cu_p``, bytes."""
    return -int(-size // CU_P) * CU_P


def m_p(t: Terms) -> int:
    """(2): fp16 and fp32 parameters in chunks; the fp16 gradient overwrites its parameter."""
    elements = t.embed_p + -(-t.other_p // t.cs) * t.cs
    return page(elements * (B16 + B32))


def m_os(t: Terms) -> int:
    """(3): Adam's momentum and variance of embedding and linear weights, by real tensor size."""
    return sum(page(t_p * (B32 + B32)) for t_p in t.tables)


def m_out(t: Terms, bs: int, sl: int) -> int:
    """(4): the checkpointed outputs of embeddings and layers."""
    return page((t.e_n + t.l_n) * (bs * sl * t.o_n) * B16)


def m_lm(t: Terms, bs: int, sl: int) -> int:
    """(5): logits, twice the shifted logits (the copy, the saved log-softmax), and the head."""
    logits = page(bs * sl * t.dict_n * t.logit_width)
    return logits + 2 * page(bs * (sl - 1) * t.dict_n * t.logit_width) + t.lm_p * B16


def m_back(t: Terms, bs: int, sl: int, tp_n: int) -> int:
    """(9): buffers of tensor parallelism's backward all-gathers."""
    return page(t.l_n * (bs * sl * t.o_n) * ((tp_n - 1) / tp_n) * B16)


def peak(t: Terms, method: str, bs: int, sl: int, gpu_n: int, tp_n: int) -> dict[str, int]:
    """Bytes per GPU, term by term; their sum is (1), (6), (7), (8) or (10).

    ``method`` is ``CDP``, ``ADP``, ``TP`` or ``DP+TP``. (10) is printed with ``m_p16 * tp_n /
    gpu_n``, right for two replicas of two shards only; it stays as printed.
    """
    p16, p32 = m_p(t) * B16 // (B16 + B32), m_p(t) * B32 // (B16 + B32)
    states = m_os(t)
    kept = {
        "CDP": (p16, p32, states),
        "ADP": (p16, p32 // gpu_n, states // gpu_n),
        "TP": (p16 // gpu_n, p32 // gpu_n, states // gpu_n),
        "DP+TP": (p16 - p16 * tp_n // gpu_n, p32 // gpu_n, states // gpu_n),
    }[method]
    return {
        "m_base": t.m_base,
        "m_p16": kept[0],
        "m_p32": kept[1],
        "optimizer_states": kept[2],
        "outputs": m_out(t, bs, sl),
        "lm_head": m_lm(t, bs, sl),
        "backward_gathers": m_back(t, bs, sl, tp_n) if method in ("TP", "DP+TP") else 0,
    }


def estimate(inp: BaselineInput) -> Answer:
    """Bytes per GPU by the equation of the run's method."""
    why = llmem_layout.cannot_express(inp.model, inp.config)
    if why:
        return cannot(why)
    method = llmem_layout.method_of(inp.zero, inp.gpus, inp.tp)
    if method is None:
        return cannot("LLMem has no equation for ZeRO-1 and ZeRO-2")
    terms = terms_of(inp)
    parts = peak(terms, method, inp.batch, inp.seq, inp.gpus, inp.tp)
    total = sum(parts.values())
    extra = {"estimate_without_base": total - terms.m_base, "chunk_elements": terms.cs}
    return Answer(bytes=total, parts={**extra, **parts}, leaves_out=list(LEAVES_OUT))


def peaks(inp: BaselineInput) -> Callable[[str, int], int]:
    """``(method, batch) -> bytes per GPU`` for `algorithm1`; the terms are read once.

    ``TP`` uses all GPUs for tensors, ``DP+TP`` ``inp.tp`` of them (two if that is 1). Raises
    ValueError where the equations do not cover the model.
    """
    why = llmem_layout.cannot_express(inp.model, inp.config)
    if why:
        raise ValueError(why)
    terms = terms_of(inp)
    shards = {"TP": inp.gpus, "DP+TP": inp.tp if inp.tp > 1 else 2}

    def bytes_of(method: str, batch: int) -> int:
        tp_n = shards.get(method, 1)
        return sum(peak(terms, method, batch, inp.seq, inp.gpus, tp_n).values())

    return bytes_of
