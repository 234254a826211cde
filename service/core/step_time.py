"""How long a step takes, learned from the steps that were run."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from service.core.batch_state import BatchState, Rows
from service.core.plan import StepPlan

Float64Array = npt.NDArray[np.float64]

_NUM_TERMS = 5
_FORGETTING = 0.99
_MIN_STEPS = 8  # measured of a kind before anything is said of it
_STEPS_PER_FIT = 32
_NUM_FIRST_STEPS = 32  # of a kind, each of which is learned from by itself
_FADING = 0.9  # from one step with a prompt to the next
_RIDGE = 1e-6
# With a smaller sum of squares, a term counts as never seen. Where it is not 0 it is at least 1, times the step's
# weight: so it was last seen thousands of steps of its kind ago (0.99 ** 6,900 = 1e-30), and what is left, times any
# load and any nanoseconds, would move no price. Below 1e-308 numbers lose their digits, and solutions overflow.
_FORGOTTEN = 1e-30
_TOLERANCE = 3.0
_SPREAD_GAIN = 0.05
_MIN_SPREAD = 0.01


# prices = _SHARES @ what is fitted. A decode row passes the same GEMMs as a token of a chunk, and then costs something
# more: so chunks that are all alike, or measured when the machine had become slower, cannot be taken for dearer.
_SHARES: Float64Array = np.eye(_NUM_TERMS)
_SHARES[2, 1] = 1.0


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step computes, in the units that its time grows with."""

    prefill_tokens: int = 0  # of all chunks
    decode_rows: int = 0
    context_tokens: int = 0  # that the decode rows attend to, themselves included
    prefill_pairs: float = 0.0  # (token of a chunk, token that it attends to)

    def terms(self) -> Float64Array:
        """float64[5]: 1 for the constant, then the fields."""
        return np.array([1.0, self.prefill_tokens, self.decode_rows, self.context_tokens, self.prefill_pairs])


def load_of(plan: StepPlan, batch: BatchState, rows: Rows | None = None) -> StepLoad:
    """The load of a plan that has not been committed. `rows` are the plan's, as a slice if they are one."""
    num_decode_rows = plan.num_decode_rows
    num_computed_tokens = batch.num_computed_tokens[plan.rows if rows is None else rows]
    # The ufunc's own method: what `sum` adds takes longer than adding thousands.
    context_tokens = int(np.add.reduce(num_computed_tokens[:num_decode_rows])) + num_decode_rows
    if plan.is_decode_only:
        return StepLoad(0, num_decode_rows, context_tokens)
    counts = plan.num_scheduled[num_decode_rows:].astype(np.float64)
    pairs = counts @ (num_computed_tokens[num_decode_rows:] + (counts + 1) / 2)
    return StepLoad(plan.num_tokens - num_decode_rows, num_decode_rows, context_tokens, float(pairs))


class StepTimeModel:
    """Nanoseconds of a step as a sum: a constant, and a price for each unit of its load; none is negative, and a decode
    row costs no less than a token of a chunk.

    Fitted by recursive least squares with exponential forgetting (Ljung, "System Identification", 11.2), in its
    information form: the decayed sums of x x' and x y are kept, and solved now and then. Steps with and without
    prompts are forgotten apart, else a long time without prompts would forget what a prompt costs. A step whose error
    is far beyond the usual counts less (Huber's weights), so that a pause of the machine does not teach; when errors
    stay large, the usual grows, and the model follows.

    Steps are looked at when somebody asks, or when they are many: to learn from one takes longer than the rest of a
    small step's scheduling. Owned by the StepTimer.
    """

    def __init__(self) -> None:
        self.recent_prefill_tokens = 0.0  # the most of one step measured, fading; 0 before the first
        self._fitted: Float64Array = np.zeros(_NUM_TERMS)
        self._price_list = [0.0] * _NUM_TERMS  # the same, for predictions: numpy is slow with five numbers
        self._information: Float64Array = np.zeros((2, _NUM_TERMS, _NUM_TERMS))  # [without or with prompts]
        self._moments: Float64Array = np.zeros((2, _NUM_TERMS))
        self._new: list[tuple[StepLoad, int]] = []  # with its nanoseconds: not looked at yet
        self._num_steps = [0, 0]
        self._spreads_ns = [0.0, 0.0]  # the usual error, absolute
        self._unfitted: list[tuple[int, float, int, StepLoad]] = []  # (kind, weight, nanoseconds, load)

    @property
    def prices(self) -> Float64Array:
        """float64[5] nanoseconds: of a step, a prefill token, a decode row, a context token, a prefill pair."""
        self._catch_up()
        return np.array(self._price_list)

    def observe(self, load: StepLoad, elapsed_ns: int) -> None:
        """A step of this load took so long."""
        if elapsed_ns <= 0:
            return
        self._new.append((load, elapsed_ns))
        if load.prefill_tokens:
            self.recent_prefill_tokens = max(_FADING * self.recent_prefill_tokens, float(load.prefill_tokens))
        if len(self._new) >= _STEPS_PER_FIT:
            self._catch_up()

    def predict_ns(self, load: StepLoad) -> float:
        """The time that a step of this load should take; 0 when nothing was measured."""
        self._catch_up()
        return self._predict_ns(load)

    def spread_ns(self, load: StepLoad) -> float:
        """By how much such a prediction is usually wrong."""
        self._catch_up()
        return self._spreads_ns[load.prefill_tokens > 0]

    def chunk_for(self, free_ns: float, num_computed_tokens: int) -> float:
        """Tokens of a chunk that add `free_ns` to a step, after `num_computed_tokens` of the prompt; may be inf."""
        self._catch_up()
        token_ns, pair_ns = self._price_list[1], self._price_list[4]
        # pair / 2 n^2 + (token + pair (computed + 1/2)) n = free
        linear = token_ns + pair_ns * (num_computed_tokens + 0.5)
        root = (linear**2 + 2 * pair_ns * max(free_ns, 0.0)) ** 0.5
        return 2 * max(free_ns, 0.0) / (linear + root) if linear + root > 0 else float("inf")

    def prompt_ns(self, num_tokens: int, num_computed_tokens: int) -> float:
        """What so many tokens add to steps, after `num_computed_tokens` of the prompt; 0 when not yet known."""
        self._catch_up()
        if self._num_steps[1] < _MIN_STEPS:
            return 0.0
        num_pairs = num_tokens * (num_computed_tokens + (num_tokens + 1) / 2)
        return self._price_list[1] * num_tokens + self._price_list[4] * num_pairs

    def least_answer_ns(
        self, num_prefill_tokens: int, num_prompt_tokens: int, min_tokens: int, max_step_tokens: int
    ) -> float:
        """The least time in which so many tokens of prompts, the own one's last, are computed, and the output comes.

        That is `min_tokens` behind the own prompt, alone on the machine. Its `num_prompt_tokens` are attended to
        wherever their K and V come from, and no other's are. 0 when not yet known.
        """
        self._catch_up()
        knows_decode, knows_prefill = (num_steps >= _MIN_STEPS for num_steps in self._num_steps)
        prefill_ns = decode_ns = 0.0
        if knows_prefill:
            num_steps = -(-num_prefill_tokens // max_step_tokens)
            prefill_ns = num_steps * self._price_list[0] + num_prefill_tokens * self._price_list[1]
        if knows_decode:
            load = StepLoad(0, 1, num_prompt_tokens)
            decode_ns = max(0, min_tokens - 1) * self._predict_ns(load)
        return prefill_ns + decode_ns

    def _predict_ns(self, load: StepLoad) -> float:
        step_ns, prefill_ns, row_ns, context_ns, pair_ns = self._price_list
        prompt_ns = prefill_ns * load.prefill_tokens + pair_ns * load.prefill_pairs
        return step_ns + row_ns * load.decode_rows + context_ns * load.context_tokens + prompt_ns

    def _catch_up(self) -> None:
        """Look at the new steps, in order."""
        for load, elapsed_ns in self._new:
            kind = int(load.prefill_tokens > 0)
            weight = self._weigh(kind, self._predict_ns(load), elapsed_ns)
            self._unfitted.append((kind, weight, elapsed_ns, load))
            self._num_steps[kind] += 1
            # A step that surprises is learned from at once, else chunks could grow for many steps on a wrong price.
            is_due = weight < 1.0 or len(self._unfitted) >= _STEPS_PER_FIT
            if is_due or self._num_steps[kind] <= _NUM_FIRST_STEPS:
                self._learn()
                self._fit()
        self._new.clear()

    def _weigh(self, kind: int, predicted_ns: float, elapsed_ns: int) -> float:
        """Huber's weight of the step; learns the usual error."""
        spread_ns = self._spreads_ns[kind]
        if self._num_steps[kind] < _MIN_STEPS:
            self._spreads_ns[kind] = max(spread_ns, _MIN_SPREAD * elapsed_ns)
            return 1.0
        error_ns = abs(elapsed_ns - predicted_ns)
        bound_ns = _TOLERANCE * spread_ns
        grown_ns = spread_ns + _SPREAD_GAIN * (min(error_ns, 2 * bound_ns) - spread_ns)
        self._spreads_ns[kind] = max(grown_ns, _MIN_SPREAD * predicted_ns)
        return 1.0 if error_ns <= bound_ns else bound_ns / error_ns

    def _learn(self) -> None:
        """Add the steps since the last fit to the sums, as if one by one."""
        for kind in (0, 1):
            steps = [step for step in self._unfitted if step[0] == kind]
            if not steps:
                continue
            decay = _FORGETTING ** np.arange(len(steps))[::-1]
            weights = decay * [weight for _, weight, _, _ in steps]
            terms = np.array([load.terms() for _, _, _, load in steps]) @ _SHARES
            weighted = weights[:, None] * terms
            kept = _FORGETTING ** len(steps)
            self._information[kind] = kept * self._information[kind] + weighted.T @ terms
            elapsed_ns = np.array([elapsed_ns for _, _, elapsed_ns, _ in steps], np.float64)
            self._moments[kind] = kept * self._moments[kind] + elapsed_ns @ weighted
        self._unfitted.clear()

    def _fit(self) -> None:
        """Solve for the prices. Where the steps say nothing, or have no finite solution, they stay what they were."""
        information, moments = self._information.sum(axis=0), self._moments.sum(axis=0)
        seen = np.diag(information)
        ridge = np.where(seen > _FORGOTTEN, _RIDGE * seen, 1.0)
        normal = information + np.diag(ridge)
        target = moments + ridge * self._fitted
        free = np.arange(_NUM_TERMS)
        fitted = np.zeros(_NUM_TERMS)
        while len(free):
            found = np.linalg.solve(normal[np.ix_(free, free)], target[free])
            if not np.isfinite(found).all():
                return
            if found.min() >= 0.0:
                fitted[free] = found
                break
            # What would be negative is taken to cost nothing, the worst one first.
            free = np.delete(free, int(np.argmin(found * np.diag(normal)[free] ** 0.5)))
        self._fitted, self._price_list = fitted, (_SHARES @ fitted).tolist()
