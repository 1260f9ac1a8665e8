"""The coverage-guided fuzzer, where atheris is installed: `python -m tests.fuzz.atheris_target tests/fuzz/corpus -max_total_time=300`.

libFuzzer's options apply; findings are written as crash-* into the working folder. `--write-corpus` writes the seeds anew. New inputs go
into the first folder that is named, so name a folder of your own before the corpus to keep it small.
"""

from __future__ import annotations

import sys


def main() -> None:
    if "--write-corpus" in sys.argv:
        from tests.fuzz.targets import CORPUS, honest_inputs

        CORPUS.mkdir(exist_ok=True)
        for name, data in honest_inputs().items():
            (CORPUS / name).write_bytes(data)
        return
    import atheris

    with atheris.instrument_imports(include=["bridge"]):
        from tests.fuzz.targets import one_input
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
