"""Generates the code of protos/ before a wheel is made of the checkout: git holds none of it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GenerateCode(BuildHookInterface[Any]):
    """Called by hatchling for each wheel, editable ones included."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Run `tools/proto.py`.

        Raises:
            subprocess.CalledProcessError: protoc refused; its own words stand on standard error.
        """
        subprocess.run([sys.executable, str(Path(self.root) / "tools" / "proto.py")], check=True)
