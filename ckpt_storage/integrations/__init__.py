"""Adapters to training frameworks, each in a module of its own that imports its framework.

Import the module you use, for example `ckpt_storage.integrations.lightning`; nothing else in the
package imports them.
"""
