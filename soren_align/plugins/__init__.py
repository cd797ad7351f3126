"""Plug-ins for tools that build the optimizer themselves: Axolotl and ms-swift (docs/hosts.md)."""
