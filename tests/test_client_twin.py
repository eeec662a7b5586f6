"""The client for plain code is what a tool makes of the one for ``async`` code.

``python -m tests.test_client_twin`` writes it anew.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import unasync

CLIENT = Path(__file__).parent.parent / "optpipe" / "client"
REPLACEMENTS = {
    "AsyncBatch": "Batch",
    "AsyncClient": "Client",
    "AsyncDeployment": "Deployment",
    "_AsyncConnection": "_Connection",
    "_AsyncHandle": "_Handle",
    "AsyncBaseTransport": "BaseTransport",
    "AsyncGenerator": "Generator",
    "aclose": "close",
    "aclosing": "closing",
    "aiter_sse": "iter_sse",
    "aread": "read",
    "asyncio": "time",
}
HEADER = (
    '"""The client for plain code, made from `optpipe.client.async_client` by ``make client``.\n\n'
    'Several threads may share a client.\n"""\n'
)


def made_twin(folder: Path) -> str:
    """What the twin has to be; ``folder`` is where the tool may write."""
    source = folder / "async" / "async_client.py"
    source.parent.mkdir()
    source.write_text((CLIENT / "async_client.py").read_text("utf-8"), "utf-8")
    rule = unasync.Rule("/async/", "/plain/", REPLACEMENTS)
    unasync.unasync_files([str(source)], [rule])
    text = (folder / "plain" / source.name).read_text("utf-8")
    text = HEADER + text.split('"""\n', 1)[1]
    text = re.sub(r"Generator\[(\w+), None\]", r"Generator[\1, None, None]", text)
    for command in (("check", "--fix-only", "--select", "I"), ("format",)):
        arguments = [sys.executable, "-m", "ruff", *command, "--stdin-filename"]
        target = str(CLIENT / "client.py")
        text = subprocess.run(
            [*arguments, target, "-"], input=text, capture_output=True, text=True, check=True
        ).stdout
    return text


def test_the_twin_is_up_to_date(tmp_path) -> None:
    """After a change of the one, `make client` writes the other."""
    assert (CLIENT / "client.py").read_text("utf-8") == made_twin(tmp_path)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        (CLIENT / "client.py").write_text(made_twin(Path(name)), "utf-8")
