"""Scheduler: which sequences compute how many tokens in the next step, and what a step's tokens change.

`schedule` turns sequences into one frozen Batch; `commit` takes the tokens that were drawn from it. Between the two
nothing is known to have been computed, so a step that fails leaves the books as they were. It never sees a logit.

A step holds first one token of every decoding sequence, then prompt tokens up to `chunk` in all (at least one, so
that prompts move however many sequences decode). Sequences go by order of arrival. A sequence is admitted with blocks
for all the tokens it has, or not at all; when a decoding one finds no free block, the youngest running one gives all
of its own back and waits to be computed again. Read next: `engine.py`.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

import numpy as np

from cutaway.engine.blocks import BlockPool, chain_digest
from cutaway.engine.sequence import Batch, FinishReason, Phase, Sequence, build_batch

__all__ = ["Scheduler"]


class Scheduler:
    """The queue of waiting sequences, the running ones, and the blocks they hold.

    With `kv_cache` off a sequence gives its blocks back after every token, so that each token is computed from
    position 0: the same kernels, and the same bits (law 1).
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        vocab: int,
        max_context: int,
        eos_ids: Iterable[int] = (),
        chunk: int = 512,
        max_seqs: int = 16,
        kv_cache: bool = True,
    ) -> None:
        self.pool, self.vocab, self.max_context = pool, vocab, max_context
        self.eos_ids = frozenset(eos_ids)
        self.chunk, self.max_seqs, self.kv_cache = chunk, max_seqs, kv_cache
        self.waiting: list[Sequence] = []  # by order of arrival
        self.running: list[Sequence] = []  # by order of arrival
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. One that may draw nothing ends here."""
        if sequence.params.max_tokens == 0:
            self.finish(sequence, FinishReason.LENGTH)
        else:
            _insert(self.waiting, sequence)

    def schedule(self, share: bool = True) -> Batch | None:
        """The next step, or None when no sequence is left. `share` lets new sequences use the prefix cache."""
        preempted = self.preemptions
        decoding = [s for s in list(self.running) if s.phase is Phase.DECODE and self._grow(s)]
        work = [(sequence, 1) for sequence in decoding]
        budget = max(1, self.chunk - len(work))
        if self.preemptions == preempted:  # blocks are not short: let more in
            self._admit(budget, share)
        for sequence in self.running:
            if budget and sequence.phase is Phase.PREFILL:
                take = min(sequence.remaining, budget)
                work.append((sequence, take))
                budget -= take
        return build_batch(work, self.pool.block_size, head_top_k=self._head_top_k(work)) if work else None

    def commit(self, batch: Batch, tokens: Iterable[int]) -> None:
        """What `batch` computed is in the KV cache; `tokens[r]` was drawn for `batch.sampled[r]`."""
        for sequence, taken in zip(batch.sequences, np.diff(batch.query_starts).tolist(), strict=True):
            if sequence.finished:  # cancelled while the step ran
                continue
            sequence.num_computed += taken
            self._publish(sequence)
            if sequence.remaining == 0:
                sequence.phase = Phase.DECODE
        for sequence, token in zip(batch.sampled, tokens, strict=True):
            if not sequence.finished:
                self._append(sequence, token)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence, whatever its phase, and take its blocks back."""
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)
        self._release(sequence)
        sequence.phase, sequence.finish_reason = Phase.FINISHED, reason

    # -- one step ---------------------------------------------------------------------------------------------------

    def _grow(self, sequence: Sequence) -> bool:
        """A block for the next token, at the cost of the youngest; False if that was the sequence itself."""
        if sequence.phase is not Phase.DECODE:
            return False
        if sequence.num_computed < len(sequence.blocks) * self.pool.block_size:
            return True
        while self.pool.num_free == 0:
            youngest = self.running[-1]
            self._suspend(youngest)
            youngest.preemptions += 1
            self.preemptions += 1
            if youngest is sequence:
                return False
        sequence.blocks += self.pool.allocate(1)
        return True

    def _admit(self, budget: int, share: bool) -> None:
        """Let waiting sequences in while there is room, in order: one that does not fit holds the later ones back."""
        budget -= sum(s.remaining for s in self.running if s.phase is Phase.PREFILL)
        for sequence in list(self.waiting):
            if budget <= 0 or len(self.running) >= self.max_seqs:
                return
            if share and self._awaits_prompt(sequence):
                continue
            found = self._find(sequence) if share and not sequence.private else []
            needed = -(-len(sequence) // self.pool.block_size) - len(found)
            spare = self.pool.num_free - sum(self.pool.references[block] == 0 for block in found)
            if needed + len(self.running) > spare:  # leave each running sequence its next block
                return
            self.pool.hold(found)
            sequence.blocks = found + self.pool.allocate(needed)
            sequence.num_computed = len(found) * self.pool.block_size
            if not sequence.output_ids:
                sequence.cached_tokens = sequence.num_computed
            sequence.phase = Phase.PREFILL
            self.waiting.remove(sequence)
            _insert(self.running, sequence)
            budget -= sequence.remaining

    def _awaits_prompt(self, sequence: Sequence) -> bool:
        """Whether another choice is still computing the prompt that this one can then find in the prefix cache."""
        first = sequence.first_choice
        return self.pool.prefix_cache and first is not None and first.phase in (Phase.WAITING, Phase.PREFILL)

    def _append(self, sequence: Sequence, token: int) -> None:
        sequence.output_ids.append(token)
        params = sequence.params
        if token in params.stop_token_ids or (token in self.eos_ids and not params.ignore_eos):
            sequence.stop_token = token
            self.finish(sequence, FinishReason.STOP)
        elif len(sequence.output_ids) == params.max_tokens or len(sequence) >= self.max_context:
            self.finish(sequence, FinishReason.LENGTH)
        elif not self.kv_cache:
            self._suspend(sequence)

    def _suspend(self, sequence: Sequence) -> None:
        """Back to waiting, without blocks; its tokens stay and are computed again."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.phase = Phase.WAITING
        _insert(self.waiting, sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.num_computed, sequence.num_published = [], 0, 0

    # -- prefix cache -----------------------------------------------------------------------------------------------

    def _find(self, sequence: Sequence) -> list[int]:
        """Blocks of its tokens that are in the prefix cache. Its last token is always left to compute."""
        if not self.pool.prefix_cache:
            return []
        return self.pool.find(self._digests(sequence, (len(sequence) - 1) // self.pool.block_size))

    def _publish(self, sequence: Sequence) -> None:
        if not self.pool.prefix_cache or sequence.private:
            return
        full = sequence.num_computed // self.pool.block_size
        published = sequence.num_published
        for block, digest in zip(
            sequence.blocks[published:full], self._digests(sequence, full)[published:], strict=True
        ):
            self.pool.publish(block, digest)
        sequence.num_published = full

    def _digests(self, sequence: Sequence, count: int) -> list[bytes]:
        size, digests = self.pool.block_size, sequence.digests
        for i in range(len(digests), count):
            digests.append(chain_digest(digests[-1] if digests else b"", sequence.slice(i * size, (i + 1) * size)))
        return digests[:count]

    def _head_top_k(self, work: list[tuple[Sequence, int]]) -> int | None:
        """The largest of what the sampled sequences need: what one of them gets more than it needs changes nothing."""
        needs = [sequence.head_top_k for sequence, take in work if take == sequence.remaining]
        known = [k for k in needs if k is not None]
        if not needs or len(known) < len(needs) or max(known) >= self.vocab:
            return None
        return max(known)


def _insert(queue: list[Sequence], sequence: Sequence) -> None:
    bisect.insort(queue, sequence, key=lambda s: s.number)
