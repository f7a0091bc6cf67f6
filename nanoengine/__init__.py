"""nanoengine: an LLM inference engine short enough to read in an evening. What it offers is imported on first use
(PEP 562): the half that only decides (scheduler, block manager, ...) can be used and tested without loading torch."""
__all__ = ["LLM", "RequestOutput", "SamplingParams"]

def __getattr__(name):
    if name not in __all__:
        raise AttributeError(f"module 'nanoengine' has no attribute {name!r}; it has {', '.join(__all__)}")
    from nanoengine import llm_engine
    return getattr(llm_engine, name.replace("LLM", "LLMEngine"))
