"""An output folder that is filled stage by stage, and is readable after every one of them."""

import copy
import json
import time
from contextlib import contextmanager
from pathlib import Path

from .whole_writes import writing

RESULTS = "results.json"


class StagedRun:
    """A run that fills a folder of its own; `results.json` there describes its finished stages, never half of one.

    Args:
        folder: a new or an empty folder.
        results: what `results.json` says from the first stage on, for example the settings.

    Raises:
        `FileExistsError`: the folder holds something already; it is left as it is.
    """

    def __init__(self, folder, results: dict):
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise FileExistsError(f"output={str(folder)!r} is a file: choose a new or an empty folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        if names := sorted(path.name for path in self.folder.iterdir()):
            held = ", ".join(names[:5])
            raise FileExistsError(
                f"output={str(folder)!r} holds another run ({held}): choose a new or an empty folder"
            )
        self.results = {**results, "stages_done": [], "stage_seconds": {}}

    @contextmanager
    def stage(self, name: str):
        """Do one stage: what the block writes into the dictionary that it gets is kept when the block is through."""
        print(f"\n[{name}]", flush=True)
        started = time.monotonic()
        draft = copy.deepcopy(self.results)
        yield draft
        draft["stages_done"].append(name)
        draft["stage_seconds"][name] = round(time.monotonic() - started, 2)
        with self.writing(RESULTS) as path:
            path.write_text(json.dumps(draft, indent=2) + "\n", encoding="utf-8")
        self.results = draft

    def writing(self, name: str):
        """A path to write the file or folder `name` to: it appears under its name once the block is through."""
        return writing(self.folder / name)

    def discard(self) -> None:
        """Leave the folder as it was before the run: empty."""
        (self.folder / RESULTS).unlink(missing_ok=True)

    def kept(self) -> str:
        """One sentence on what the folder holds."""
        if not self.results["stages_done"]:
            return "no stage was finished, nothing is kept"
        return f"the finished stages ({', '.join(self.results['stages_done'])}) are kept in {self.folder / RESULTS}"
