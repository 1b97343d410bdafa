"""torch.compile on a machine without the GPU: what Inductor's code allocates, recorded on meta.

The user's own Dynamo captures the model's code, AOTAutograd differentiates it and decides what is
saved for backward, Inductor fuses it, reuses buffers and writes its program for the target device.
Only two things are ours: the tensors are on meta (``device.py`` tells Inductor that they are on the
device) and the kernels have no code (``codegen.py``), so that no compiler and no Triton is needed.
Running Inductor's program on meta (``program.py``) then makes and frees what it would.

    model or blocks ─ Dynamo ─▶ FX ─ AOTAutograd ─▶ joint graph ─▶ forward, backward
                                    (backend.py)      ─ Inductor ─▶ program on meta ─▶ recorder
"""
