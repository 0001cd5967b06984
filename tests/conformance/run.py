"""Run Transformers' own common tests on our models, and on its own models beside them.

    python tests/conformance/run.py [PYTEST OPTIONS]

The tests come from the source archive of the installed Transformers, which is downloaded; none of them is kept here.
`common_models.py` says which models they run on. It is an error if a test fails, if ours does not pass one that
Transformers' own model passes, unless `NOT_OURS` has the reason, or if a reason there is not needed.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import transformers

HERE = Path(__file__).parent
# What the archive lacks, by what has to stand in for it: the tests of other things than models.
STAND_INS = {
    "exporters/test_export.py": "class ExportTesterMixin: ...\n",
    "generation/test_utils.py": "class GenerationTesterMixin: ...\n",
    "utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
}
# Our models by the model of Transformers that they are held against.
PEERS = {
    "AsymLoopModelTest": "LlamaModelTest",
    "AsymLoopWindowModelTest": "LlamaModelTest",
    "AsymLoopOlmo2ModelTest": "Olmo2ModelTest",
    "AsymLoopOlmoeModelTest": "OlmoeModelTest",
    "FullLoopModelTest": "LlamaModelTest",
    "FullLoopOlmoeModelTest": "OlmoeModelTest",
}
LEAST = 100  # passed tests of each model: fewer did not run
SEVERITY = ("skipped", "passed", "failed")
# Tests that a peer passes and ours skips.
NOT_OURS = {
    "test_bc_cache_name_forward": "wants Transformers' own kind of cache back; an AsymLoop makes an AsymLoopCache",
    "test_can_load_from_already_mapped_keys": "no other form of checkpoint is converted to ours",
    "test_moe_models_record_router_logits": "reads the source for the experts' decorator; ours are Transformers' own",
    "test_reverse_loading_mapping": "no other form of checkpoint is converted to ours",
}


def download_tests(folder: Path) -> Path:
    """The folder of the tests in the source archive of the installed Transformers."""
    version = transformers.__version__
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*pip, "--dest", str(folder), f"transformers=={version}"], check=True)
    with tarfile.open(folder / f"transformers-{version}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / f"transformers-{version}" / "tests"


def arrange(tests: Path) -> None:
    """Put our models and what stands in for missing modules among the tests."""
    for file, text in STAND_INS.items():
        write(tests / file, text)
        write(tests / file.split("/")[0] / "__init__.py", "")
    write(tests / "__init__.py", "")
    write(tests / "distributed_testing_utils.py", (HERE / "distributed_processes.py").read_text())
    write(tests / "test_common_models.py", (HERE / "common_models.py").read_text())


def write(file: Path, text: str) -> None:
    """Write a file that is not there yet."""
    if file.exists() and file.read_text() != text:
        raise FileExistsError(f"{file} is in the archive of transformers=={transformers.__version__} now: use that.")
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)


def run_tests(tests: Path, options: list[str]) -> dict[str, dict[str, str]]:
    """What became of each test of each model: `"passed"`, `"skipped"` or `"failed"`."""
    report = tests.parent / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "tests/test_common_models.py", f"--junitxml={report}"]
    quiet = ["-p", "no:cacheprovider", "-o", "log_cli=false", "--disable-warnings", "--tb=short"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    code = subprocess.run([*command, *quiet, *options], cwd=tests.parent, env=environment).returncode
    if code not in (0, 1):  # all passed, some failed
        sys.exit(f"pytest ended with {code}: the tests did not all run")
    results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        model = case.get("classname").split(".")[-1]
        # A test in parts has several entries: one that failed counts most, then one that passed.
        names = results.setdefault(model, {})
        names[case.get("name")] = max(outcome(case), names.get(case.get("name"), "skipped"), key=SEVERITY.index)
    return results


def outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "passed" if case.find("skipped") is None else "skipped"


def check(results: dict[str, dict[str, str]]) -> list[str]:
    """What is wrong, a line each."""
    models = {**PEERS, **{peer: peer for peer in PEERS.values()}}
    wrong = [
        f"{model}: {passed(results, model)} passed, fewer than {LEAST}"
        for model in models
        if passed(results, model) < LEAST
    ]
    wrong += [
        f"{model}::{name} failed" for model in results for name, became in results[model].items() if became == "failed"
    ]
    needed = set()
    for model, peer in PEERS.items():
        ours = results.get(model, {})
        worse = {
            name for name, became in results.get(peer, {}).items() if became == "passed" and ours.get(name) != "passed"
        }
        needed |= worse
        wrong += [
            f"{model}::{name} {ours.get(name, 'missing')}, {peer}: passed" for name in sorted(worse - NOT_OURS.keys())
        ]
    return wrong + [f"{name}: all of ours pass it" for name in sorted(NOT_OURS.keys() - needed)]


def passed(results: dict[str, dict[str, str]], model: str) -> int:
    return list(results.get(model, {}).values()).count("passed")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tests = download_tests(Path(folder))
        arrange(tests)
        results = run_tests(tests, sys.argv[1:])
    print(f"\nTransformers {transformers.__version__}, common tests: passed, skipped, failed")
    for model, names in results.items():
        counts = Counter(names.values())
        print(f"{model:<28}" + "".join(f"{counts[became]:>8}" for became in ("passed", "skipped", "failed")))
    wrong = check(results)
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
