"""Cross-entropy in chunks of tokens, as TRL's SFTTrainer has it (``loss_type="chunked_nll"``).

Read in huggingface/trl 1.10.0.dev0 (f2cd577), trl/trainer/sft_trainer.py:
``_patch_chunked_ce_lm_head``, ``_chunked_cross_entropy_loss``, ``_chunk`` and
``_CHUNKED_LM_HEAD_CHUNK_SIZE``. The head is never applied to all tokens: chunks of 256 tokens go
through it in fp32 under a checkpoint, so that one chunk's logits [256, V] are alive at a time, and
again in backward.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from llmem.errors import LlmemError
from llmem.spec import RunSpec

CHUNK = 256
"""Tokens per chunk."""

IGNORED = -100


def check_loss(spec: RunSpec) -> None:
    """Raises LlmemError where the loss cannot be computed in chunks."""
    if spec.loss != "chunked":
        return
    if spec.liger:
        raise LlmemError("--loss chunked is not compatible with --liger (TRL refuses both)")
    if spec.tp > 1 or spec.pp > 1:
        what = "--tp" if spec.tp > 1 else "--pp"
        raise LlmemError(f"--loss chunked with {what} is not supported; use --loss full")


def chunk_loss(model: torch.nn.Module, spec: RunSpec, notes: list[str]) -> None:
    """Let the causal LM in ``model`` make its loss in chunks, if ``spec`` asks for it.

    Raises LlmemError if the model has no head of its own, or a peft adapter on it.
    """
    if spec.loss != "chunked":
        return
    inner: Any = getattr(model, "get_base_model", lambda: model)()
    head = getattr(inner, "get_output_embeddings", lambda: None)()
    if head is None or not isinstance(getattr(inner, "base_model", None), torch.nn.Module):
        raise LlmemError(
            f"{type(inner).__name__} has no language-model head to chunk; use --loss full"
        )
    if hasattr(head, "base_layer"):
        raise LlmemError(
            "--loss chunked does not work with an adapter on the head (TRL refuses it); name other "
            "--lora-target-modules, or use --loss full"
        )
    config = inner.config.get_text_config()
    head.forward = MethodType(_chunk, head)
    head.logit_scale = getattr(config, "logit_scale", 1.0)
    head.softcap = getattr(config, "final_logit_softcapping", None)
    inner.forward = MethodType(_forward, inner)
    notes.append(
        f"loss: chunks of {CHUNK} tokens in fp32, each under a checkpoint, no token ignored "
        "(TRL's chunked_nll)"
    )


def _forward(
    self: Any,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    use_cache: Any = None,
    **others: Any,
) -> Any:
    """The model's forward: hidden states [B, S, H] to the loss, never to logits."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    if labels is None:
        raise LlmemError("--loss chunked needs labels in the batch")
    outputs = self.base_model(
        input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **others
    )
    hidden = outputs.last_hidden_state
    loss = chunked_cross_entropy(hidden, labels, self.get_output_embeddings())
    return CausalLMOutputWithPast(loss=loss, past_key_values=outputs.past_key_values)


def chunked_cross_entropy(
    hidden: torch.Tensor, labels: torch.Tensor, head: torch.nn.Module
) -> torch.Tensor:
    """The mean loss of hidden [B, S, H] against labels [B, S] shifted by one.

    ``head`` maps hidden [C, H] and labels [C] of a chunk to its summed loss, the number of tokens
    that it predicts and its entropy. How many labels are ignored cannot be asked on meta: all count.
    """
    width = hidden.size(-1)
    hidden = hidden[..., :-1, :].reshape(-1, width)
    labels = labels[..., 1:].reshape(-1)
    valid = labels != IGNORED
    count = valid.sum()
    correct = hidden.new_zeros((), dtype=torch.float32)
    entropy = hidden.new_zeros((), dtype=torch.float32)
    order = valid.to(torch.int8).argsort(descending=True, stable=True)
    hidden, labels = hidden[order], labels[order]
    loss = hidden.new_zeros((), dtype=torch.float32)
    for start in range(0, labels.numel(), CHUNK):
        stop = start + CHUNK
        # The RNG state is kept on the host; keeping it fails for meta tensors.
        parts = checkpoint(
            head, hidden[start:stop], labels[start:stop],
            use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
        chunk_loss, chunk_correct, chunk_entropy = parts
        loss = loss + chunk_loss
        correct = correct + chunk_correct
        entropy = entropy + chunk_entropy
    return loss / count


def _chunk(
    self: Any, hidden: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the head does with a chunk: hidden [C, H], labels [C]; logits [C, V] in fp32."""
    logits = hidden.float() @ self.weight.float().t()
    if self.bias is not None:
        logits = logits + self.bias.float()
    if self.logit_scale != 1.0:
        logits = logits * self.logit_scale
    if self.softcap is not None:
        logits = self.softcap * torch.tanh(logits / self.softcap)
    log_p = F.log_softmax(logits, dim=-1)
    loss = F.nll_loss(log_p, labels, ignore_index=IGNORED, reduction="sum")
    valid = labels != IGNORED
    correct = ((logits.argmax(dim=-1) == labels) & valid).sum().float()
    entropy = (-(log_p.exp() * log_p).sum(dim=-1) * valid).sum()
    return loss, correct, entropy
