"""Parts of nanoengine to be written again. `python -m exercises list` names them, a handout is exercises/NAME.md."""
