"""Waiting of several processes for each other while they write, in a way that a failed one can end."""

import collections
import itertools
import sys
import time

import jax
import orbax.checkpoint as ocp

SECONDS_BETWEEN_LOOKS = 0.05


class Barrier:
    """orbax's barrier for background writes, but broken by the first process whose write fails.

    With the barrier of jax the others would wait for that process until the time is over, twenty minutes by default,
    and so would the process itself, since orbax meets the others once more before it lets an error out. `failure` says
    in every process what happened, "" while nothing has; a barrier that broke once stays broken. Every process makes
    its barriers in the same order.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.failure = ""
        self._folder = f"efla_jax/checkpoint/{next(self._numbers)}"
        self._calls: collections.Counter[str] = collections.Counter()
        self._passed = ""

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Return when every process has called with this key as often; RuntimeError when one failed or none came."""
        error = sys.exc_info()[1]  # of the write: orbax comes here from a `finally`
        try:
            self._meet(key, timeout_ms / 1000, error)
        except Exception as broken:  # also when the process that failed has taken the coordinator with it
            self.failure = self.failure or str(broken)
            raise

    def broken(self) -> bool:
        """Whether some process failed: ask while a write goes on, since it may be stuck far from any barrier."""
        try:
            failed = ocp.multihost.get_jax_distributed_client().key_value_dir_get(f"{self._folder}/failed/")
            self.failure = self.failure or (failed[0][1] if failed else "")
        except Exception as gone:
            self.failure = self.failure or str(gone)
        return bool(self.failure)

    def _meet(self, key: str, timeout: float, error: BaseException | None) -> None:
        client, me = ocp.multihost.get_jax_distributed_client(), jax.process_index()
        self._calls[key] += 1
        here = f"{self._folder}/at/{key}/{self._calls[key]}"
        if error is not None and not self.failure:
            client.key_value_set(f"{self._folder}/failed/{me}", f"process {me}: {error}", allow_overwrite=True)
        client.key_value_set(f"{here}/{me}", "", allow_overwrite=True)
        until = time.monotonic() + timeout
        while len(client.key_value_dir_get(f"{here}/")) < jax.process_count():
            if failed := client.key_value_dir_get(f"{self._folder}/failed/"):
                raise RuntimeError(failed[0][1])
            if time.monotonic() > until:
                raise RuntimeError(f"a process did not come to {key} within {timeout:.0f} s")
            time.sleep(SECONDS_BETWEEN_LOOKS)
        if self._passed:  # everybody is here, so nobody looks there any more
            client.key_value_delete(self._passed)
        self._passed = f"{here}/{me}"
