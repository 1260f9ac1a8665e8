"""Devices: one folder for each vendor, each registered in the entry point group `kvbridge.devices`."""
