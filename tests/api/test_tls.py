"""HTTPS: spoken with a certificate and its key, refused with anything else."""

import os
import re
import shutil
import ssl
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from optpipe.errors import InputError, WorldError
from optpipe_api import Settings, main
from tests.api.live import FAKE, make_settings

DATA = Path(__file__).parent.parent / "data" / "tls"
CERTIFICATE, KEY = DATA / "certificate.pem", DATA / "key.pem"


def serve(folder: Path, *options: object) -> subprocess.Popen[bytes]:
    variables = {
        "OPTPIPE_DATABASE_URL": f"sqlite:///{folder}/jobs.db",
        "OPTPIPE_SOLVE_PATH": FAKE,
        "OPTPIPE_SOLVER_PROCESSES": "1",
        "NO_COLOR": "1",
        "PYTHONPATH": os.pathsep.join([str(DATA.parents[2]), *filter(None, sys.path)]),
    }
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "optpipe.cli", "serve", "--port", "0", *map(str, options)],
            env=os.environ | variables,
            stderr=log,
        )


def test_a_server_with_a_certificate_speaks_https_only(tmp_path) -> None:
    process = serve(tmp_path, "--ssl-certfile", CERTIFICATE, "--ssl-keyfile", KEY)
    try:
        while (found := re.search(r"https://127.0.0.1:\d+", log_of(tmp_path))) is None:
            assert process.poll() is None, log_of(tmp_path)
            time.sleep(0.05)
        trust = ssl.create_default_context(cafile=CERTIFICATE)
        with httpx.Client(base_url=found[0], verify=trust, timeout=60) as http:
            assert first_answer(http).json() == {"status": "ok"}
        with pytest.raises(httpx.HTTPError):
            httpx.get(found[0].replace("https", "http") + "/healthz", timeout=60)
    finally:
        process.terminate()
        assert process.wait(30) == 0


def first_answer(http: httpx.Client) -> httpx.Response:
    """Ask until the server listens; its log says the address a moment before."""
    for _ in range(600):
        with suppress(httpx.ConnectError):
            return http.get("/healthz")
        time.sleep(0.1)
    raise AssertionError("the server does not listen")


def log_of(folder: Path) -> str:
    return (folder / "log").read_text("utf-8")


@pytest.mark.parametrize("fault", ["absent", "swapped", "no PEM"])
def test_a_certificate_that_cannot_be_used_is_refused_before_the_start(tmp_path, fault) -> None:
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    if fault == "swapped":
        shutil.copy(CERTIFICATE, key)
        shutil.copy(KEY, certificate)
    elif fault == "no PEM":
        shutil.copy(CERTIFICATE, certificate)
        key.write_text("hello")
    settings = make_settings(tmp_path, port=0, ssl_certfile=certificate, ssl_keyfile=key)
    with pytest.raises(WorldError, match=rf"cannot use the certificate {certificate} .*{key}"):
        main._serve(settings)


def test_a_certificate_without_key_is_no_setting() -> None:
    with pytest.raises(InputError, match="come together"):
        Settings.load(ssl_certfile=CERTIFICATE)
