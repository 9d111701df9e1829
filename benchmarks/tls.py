"""The cost of TLS: records per second and CPU of producer, consumer and broker, against the same without TLS.

Both sides have certificates (mutual TLS). Records have 1 KB; with zstd fewer bytes are encrypted. The consumer reads
through the broker, so that all bytes pass the socket of a broker twice.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.child import Child
from benchmarks.results import Figure, Options, median

NAME = "tls"
RATE_BOUND = 0.6  # of the rate without TLS
HOST = "127.0.0.1"


def run(options: Options) -> list[Figure]:
    """Measure both codecs with both sides in turns."""
    figures = []
    with tempfile.TemporaryDirectory(prefix="memq-bench-") as folder, ExitStack() as stack:
        files = certificates(Path(folder))
        variables = {f"MEMQ_TLS_{name.upper()}": file for name, file in files.items()}
        sides = {"plain": (None, {}), "tls": ({**files, "clients": "required"}, variables)}
        brokers, clients = {}, {}
        for side, (section, environment) in sides.items():
            brokers[side] = stack.enter_context(Child("broker", store="recent", tls=section))
            address = brokers[side].ready["address"]
            clients[side] = stack.enter_context(Child("memq_client", address=address, environment=environment))
        for codec in ("zstd", "none"):
            figures += _figures(options, brokers, clients, codec)
    return figures


def certificates(folder: Path) -> dict[str, str]:
    """Make an authority and one certificate for all; return the files by the names of the section `[tls]`."""
    for arguments in (["init"], ["issue", "bench", "--host", HOST]):
        command = [sys.executable, "-m", "memq", "certs", *arguments, "--dir", str(folder)]
        subprocess.run(command, check=True, capture_output=True)
    names = {"ca_file": "ca.pem", "cert_file": "bench.pem", "key_file": "bench-key.pem"}
    return {name: str(folder / file) for name, file in names.items()}


def _figures(options: Options, brokers: dict[str, Child], clients: dict[str, Child], codec: str) -> list[Figure]:
    records = 100_000 if options.quick else 300_000
    rates: dict[str, list[float]] = {}
    costs: dict[str, list[float]] = {}
    for number in range(options.rounds + 1):
        for side, client in clients.items():
            params = {"topic": f"tls-{codec}-{number}", "records": records}
            for step, more in (
                ("produce", {"size": 1_000, "codec": codec, "partitions": 1}),
                ("consume", {"read": "broker"}),
            ):
                before_s = brokers[side].cpu_s()
                found = client.ask(step, **params, **more)
                if number:  # the first round warms up
                    rates.setdefault(f"{side} {step}", []).append(records / (found["ended_s"] - found["began_s"]))
                    cpu_s = found["cpu_s"] + brokers[side].cpu_s() - before_s
                    costs.setdefault(f"{side} {step}", []).append(cpu_s / records * 1e9)
    figures = []
    for step in ("produce", "consume"):
        ns = {side: median(costs[f"{side} {step}"]) for side in clients}
        rate = {side: median(rates[f"{side} {step}"]) for side in clients}
        detail = {"plain records/s": rate["plain"], "plain ns": ns["plain"], "tls ns": ns["tls"]}
        ratio = rate["tls"] / rate["plain"]
        figures.append(Figure(NAME, f"{step}, 1 KB, {codec}", ratio, "of plain", _bound(codec), "higher", {**detail}))
        options.say(figures[-1].line())
    return figures


def _bound(codec: str) -> float | None:
    return RATE_BOUND if codec == "zstd" else None
