"""Rewards per token, and advantages: how much better a completion was than expected."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.masking import masked_sum


def dead_groups(rewards: Float[Array, "B G"], *, tol: float = 1e-6) -> Bool[Array, "B"]:
    """Groups that teach nothing: all rewards equal, max − min ≤ tol.

    Decided on the rewards. The standard deviation of equal floats is often not 0, and
    dividing by that residue makes huge advantages out of rounding.
    """
    return rewards.max(-1) - rewards.min(-1) <= tol


def group_normalized(
    rewards: Float[Array, "B G"], *, ddof: int = 1, eps: float = 1e-6
) -> Float[Array, "B G"]:
    """GRPO's advantage: rewards standardised within their group.

      Âᵢ = (Rᵢ − mean(R)) / (std(R) + ε);   exactly 0 in a group of equal rewards

    Published code disagrees on the details: the paper's std leaves ddof open; TRL uses ddof = 1 and
    ε = 1e-4, verl ddof = 1 and ε = 1e-6, others ddof = 0 and ε = 1e-8.

    Args:
        rewards: R, one per completion, any unit.
        ddof: delta degrees of freedom of the standard deviation, 0 or 1.
        eps: ε, in units of the reward.

    References:
        Shao et al. 2024 (DeepSeekMath), section 4.1.2, https://arxiv.org/abs/2402.03300
    """
    centered = rewards - rewards.mean(-1, keepdims=True)
    std = rewards.std(-1, ddof=ddof, keepdims=True)
    return jnp.where(dead_groups(rewards)[:, None], 0.0, centered / (std + eps))


def group_centered(rewards: Float[Array, "B G"]) -> Float[Array, "B G"]:
    """Dr. GRPO's advantage: Âᵢ = Rᵢ − mean(R); exactly 0 in a group of equal rewards.

    References:
        Liu et al. 2025, section 3.2, https://arxiv.org/abs/2503.20783
    """
    centered = rewards - rewards.mean(-1, keepdims=True)
    return jnp.where(dead_groups(rewards)[:, None], 0.0, centered)


def leave_one_out(rewards: Float[Array, "B G"]) -> Float[Array, "B G"]:
    """RLOO's advantage: Âᵢ = Rᵢ − mean of the other G − 1 rewards; 0 in a group of equal rewards.

    It equals G/(G − 1) times `group_centered`.

    References:
        Ahmadian et al. 2024, section 2.2, https://arxiv.org/abs/2402.14740
    """
    group_size = rewards.shape[-1]
    return group_centered(rewards) * (group_size / (group_size - 1))


def soft_overlong_penalty(
    lengths: Int[Array, "*b"], *, max_length: int, cache: int
) -> Float[Array, "*b"]:
    """DAPO's length penalty, to be added to the reward.

      0                             |o| ≤ L_max − L_cache
      (L_max − L_cache − |o|)/L_cache    in between
      −1                            |o| > L_max

    Args:
        lengths: |o|, in tokens.
        max_length: L_max, in tokens.
        cache: L_cache, in tokens, at least 1.

    References:
        Yu et al. 2025 (DAPO), eq. 13, https://arxiv.org/abs/2503.14476
    """
    return jnp.clip((max_length - cache - lengths) / cache, -1.0, 0.0)


def token_rewards(rewards: Float[Array, "*b"], mask: Bool[Array, "*b T"]) -> Float[Array, "*b T"]:
    """The completion's reward at its last sampled token, 0 elsewhere."""
    is_sampled_later = jnp.cumsum(mask[..., ::-1], -1)[..., ::-1] > mask
    return jnp.where(mask & ~is_sampled_later, rewards[..., None], 0.0)


def gae(
    reward_t: Float[Array, "*b T"],
    value_t: Float[Array, "*b T"],
    mask: Bool[Array, "*b T"],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Float[Array, "*b T"]:
    """Generalized advantage estimation over the sampled tokens of each row.

      δₜ = rₜ + γ V(sₜ₊₁) − V(sₜ),   Âₜ = δₜ + γλ Âₜ₊₁

    t + 1 is the next *sampled* token: what an environment wrote in between is no step of the
    policy. After the last one V is 0. λ = 1 gives the reward-to-go minus V(sₜ).

    Args:
        reward_t: reward of each token.
        value_t: V(sₜ), the prediction before token t.
        mask: the tokens that the policy sampled.
        gamma: γ, discount per token.
        lam: λ, in [0, 1].

    Returns:
        Advantages, 0 where not sampled. The value model's targets are Âₜ + V(sₜ).

    References:
        Schulman et al. 2015, eq. 16, https://arxiv.org/abs/1506.02438
    """

    def step(carry, now):
        # carry: V and Â of the next sampled token, both [*b]
        next_value, next_adv = carry
        reward, value, is_sampled = now
        adv = reward + gamma * next_value - value + gamma * lam * next_adv
        carry = jnp.where(is_sampled, value, next_value), jnp.where(is_sampled, adv, next_adv)
        return carry, jnp.where(is_sampled, adv, 0.0)

    times = jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), (reward_t, value_t, mask))
    zero = jnp.zeros_like(times[0][0])
    _, adv_t = jax.lax.scan(step, (zero, zero), times, reverse=True)
    return jnp.moveaxis(adv_t, 0, -1)


def whiten(
    values: Float[Array, "*b"],
    mask: Bool[Array, "*b"],
    *,
    axis_name: str | None = None,
    eps: float = 1e-8,
) -> Float[Array, "*b"]:
    """(x − mean)/(std + ε) over the selected values of the whole batch, all devices included.

    Unselected values become 0, and so do all when they are equal but for rounding.
    """
    mean = masked_sum(values, mask).mean(axis_name)
    centered = jnp.where(mask, values - mean, 0.0)
    std = jnp.sqrt(masked_sum(centered**2, mask).mean(axis_name))
    is_flat = std <= 1e-6 * jnp.abs(mean)
    return jnp.where(is_flat, 0.0, centered / (std + eps))
