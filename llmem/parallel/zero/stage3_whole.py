"""ZeRO-3 without ``zero.Init``: the whole model moves to every GPU, then each keeps its part.

Read in DeepSpeed 0.19: ``_configure_distributed_model`` in runtime/engine.py (the parameters are
cast where they were loaded, which is the host, then ``module.to(device)``),
``Init._convert_to_zero_parameters`` and ``_partition_param`` in runtime/zero/partition_parameters.py
(one parameter after the other: its part is allocated and copied, then it is freed) and
``defragment`` in runtime/zero/utils.py (the trained parts go to the host, the cache is emptied, and
they come back as one buffer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from llmem.lifetimes import Category, Parameter
from llmem.parallel.editor import Editor


def partition_whole_model(
    editor: Editor,
    parameters: Iterable[Parameter],
    part_on_gpu: Callable[[Parameter], int],
    at: int,
) -> None:
    """Add the whole model at tick ``at`` and all that happens before the trained parts' buffer.

    ``parameters`` in model order, each once; ``part_on_gpu``: bytes of the part of one that stays
    on the GPU, 0 if it goes to the host. Frozen parts stay where they are.
    """
    whole = [
        (p, editor.add(p.nbytes, editor.at(at), category=Category.PARAMETER, key=p.key))
        for p in parameters
    ]
    trained = []
    for parameter, handle in whole:
        if nbytes := part_on_gpu(parameter):
            part = editor.add(
                nbytes, editor.at(at), category=Category.PARAMETER, key=parameter.key
            )
            if parameter.trainable:
                trained.append(part)
        editor.free(handle, at)
    editor.free(trained, at)
    editor.empty_cache(editor.at(at))
