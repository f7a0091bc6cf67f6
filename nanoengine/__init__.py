"""nanoengine: an LLM inference engine short enough to read in an evening.

`LLM` and `SamplingParams` are imported on first use (PEP 562), so that the half of the engine that only decides
(scheduler, block manager, ...) can be used and tested without loading torch.
"""

_HOMES = {"LLM": "llm_engine", "RequestOutput": "llm_engine", "SamplingParams": "sampling_params"}
__all__ = list(_HOMES)

def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module 'nanoengine' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module
    return getattr(import_module(f"nanoengine.{_HOMES[name]}"), name)
