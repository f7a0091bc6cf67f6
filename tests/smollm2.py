"""The one real model of the tests: SmolLM2-135M-Instruct, as example.py prepares it."""

from pathlib import Path

import pytest

from example import DemoModelMissing, demo_model_folder


def smollm2_folder() -> Path:
    """Returns the model's folder; skips the calling test where the model's packages aren't installed."""
    try:
        return demo_model_folder()
    except DemoModelMissing as missing:
        pytest.skip(str(missing).splitlines()[0])
