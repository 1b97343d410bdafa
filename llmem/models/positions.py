"""How long a sequence a model's position table allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# model_type of classes that look each position up in a table of fixed length: learned embeddings
# (GPT-2, OPT, BERT, …) or precomputed sines (CodeGen and GPT-J keep their rotary sines in such a
# table, CTRL and Marian add theirs). A longer sequence is an IndexError. Found by building every
# causal, masked and sequence-to-sequence class of transformers 5.24 and looking for such a table.
# Tables that are computed anew for longer sequences (XGLM, M2M-100, FSMT) are no limit, nor are
# rotary frequencies, ALiBi and relative biases.
_TABLE = """
    albert bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot blenderbot-small
    codegen convbert ctrl deberta deberta-v2 distilbert electra ernie flaubert fnet git gpt-sw3
    gpt2 gpt_bigcode gpt_neo gptj layoutlm led marian mbart megatron-bert mobilebert mvp openai-gpt
    opt pegasus perceiver plbart rembert roc_bert roformer squeezebert tapas trocr whisper xlm
"""

# The same, but positions are numbered from pad_token_id + 1 on: the first rows are never used.
_TABLE_AFTER_PADDING = """
    camembert data2vec-text ibert longformer luke mpnet roberta roberta-prelayernorm xlm-roberta
    xlm-roberta-xl xmod
"""

_LENGTH_KEYS = (
    "max_target_positions",
    "max_decoder_position_embeddings",
    "max_position_embeddings",
    "n_positions",
)


def max_positions(config: PretrainedConfig) -> int | None:
    """The longest sequence, in tokens, that the position table of `config` allows, if it has one.

    A model that computes its positions (Llama, Qwen, BLOOM, T5, …) runs on any length, however
    badly it was trained for it, so its `max_position_embeddings` is no limit here.
    """
    text = config.get_text_config()
    if getattr(text, "model_type", "") in _TABLE.split() and getattr(
        text, "position_biased_input", True
    ):
        return _table_length(text)
    if getattr(text, "model_type", "") in _TABLE_AFTER_PADDING.split():
        length = _table_length(text)
        return None if length is None else length - (text.pad_token_id or 0) - 1
    return None


def _table_length(config: PretrainedConfig) -> int | None:
    lengths = (getattr(config, key, None) for key in _LENGTH_KEYS)
    return next((int(length) for length in lengths if isinstance(length, int)), None)
