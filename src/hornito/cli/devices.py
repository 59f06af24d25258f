"""`hornito devices`: the Vulkan devices of this machine, the default first."""

from __future__ import annotations

import argparse
import dataclasses

from hornito.cli.options import add_json
from hornito.cli.output import print_json, print_table
from hornito.errors import NoDeviceError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the verb's command line."""
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the devices; without a usable one the exit code is that of NoDeviceError."""
    from hornito.vk.device import list_devices

    devices = list_devices()
    if arguments.json:
        print_json({"devices": [dataclasses.asdict(device) for device in devices]})
    elif devices:
        rows = [
            (
                device.index,
                device.name,
                device.kind,
                f"{device.driver_name} {device.driver_info}",
                device.pci or "-",
                device.uuid,
                "yes" if device.usable else f"no: {device.reason}",
            )
            for device in devices
        ]
        print_table(
            ("index", "name", "kind", "driver", "pci", "uuid", "usable"), rows, records=True
        )
    if not any(device.usable for device in devices):
        raise NoDeviceError(
            f"none of {len(devices)} Vulkan devices is usable; a driver is needed, such as the one"
            " of your GPU's vendor or `apt install mesa-vulkan-drivers`"
        )
    return 0
