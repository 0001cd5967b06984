"""AsymLoop in plain PyTorch, written from the equations alone: no Transformers, no cache, no fused kernel."""

import torch
from torch.nn.functional import layer_norm, linear, silu


def rms_norm(x, weight, eps):
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def rotate(x, position_ids, theta):
    half = x.shape[-1] // 2
    inverse_frequencies = 1 / theta ** (torch.arange(0, 2 * half, 2, dtype=torch.float32) / (2 * half))
    angles = (position_ids[:, None, :, None].float() * inverse_frequencies).repeat(1, 1, 1, 2)
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * angles.cos().to(x.dtype) + turned * angles.sin().to(x.dtype)


class Reference:
    """Logits of an AsymLoop model from its configuration and state dict; `router_logits` has those of each visit."""

    def __init__(self, config, weights):
        self.config, self.weights = config, weights
        self.router_logits = []

    def project(self, x, name):
        return linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x, name):
        if self.config.backbone == "olmo":
            return layer_norm(x, x.shape[-1:], eps=1e-5)
        return rms_norm(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    def heads(self, x, name):
        """Queries, keys or values by head: projected, normalised over all heads together, clipped."""
        projected = self.project(x, f"{name}_proj")
        if self.config.backbone in ("olmo2", "olmoe") and not name.endswith("v"):
            projected = self.norm(projected, f"{name}_norm")
        if self.config.clip_qkv is not None:
            projected = projected.clamp(-self.config.clip_qkv, self.config.clip_qkv)
        return projected.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def layer(self, x, name, position_ids, causal, global_kv=None):
        """One layer; with `global_kv` its softmax runs over [global ; local]. Returns the state and its own KV."""
        sees = (position_ids, causal, global_kv)
        if self.config.backbone == "olmo2":  # norms of what is added
            attended, own_kv = self.attention(x, f"{name}.self_attn", *sees)
            x = x + self.norm(attended, f"{name}.post_attention_layernorm")
            return x + self.norm(self.mlp(x, f"{name}.mlp"), f"{name}.post_feedforward_layernorm"), own_kv
        attended, own_kv = self.attention(self.norm(x, f"{name}.input_layernorm"), f"{name}.self_attn", *sees)
        x = x + attended
        return x + self.mlp(self.norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp"), own_kv

    def attention(self, x, name, position_ids, causal, global_kv):
        config = self.config
        theta = config.rope_parameters["rope_theta"]
        q = rotate(self.heads(x, f"{name}.q"), position_ids, theta)
        k = rotate(self.heads(x, f"{name}.k"), position_ids, theta)
        v = self.heads(x, f"{name}.v")
        keys, values, seen = k, v, causal
        if global_kv is not None:
            window = config.local_window or x.shape[1]
            near = torch.ones_like(causal).triu(1 - window)
            keys, values = torch.cat([global_kv[0], k], 2), torch.cat([global_kv[1], v], 2)
            seen = torch.cat([causal, causal & near], -1)
        groups = config.num_attention_heads // config.num_key_value_heads
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        scores = (q @ keys.mT / config.head_dim**0.5).masked_fill(~seen, -torch.inf)
        attended = (scores.softmax(-1) @ values).transpose(1, 2).flatten(2)
        return self.project(attended, f"{name}.o_proj"), (k, v)

    def mlp(self, x, name):
        if f"{name}.gate.weight" in self.weights:
            return self.experts(x, name)
        gated = silu(self.project(x, f"{name}.gate_proj")) * self.project(x, f"{name}.up_proj")
        return self.project(gated, f"{name}.down_proj")

    def experts(self, x, name):
        """Every expert on every token, weighted by zero where it is not among the likeliest of the token."""
        logits = self.project(x, f"{name}.gate")
        self.router_logits.append(logits)
        probabilities = logits.softmax(-1)
        lowest = probabilities.topk(self.config.num_experts_per_tok).values[..., -1:]
        picked = probabilities * (probabilities >= lowest)
        if self.config.norm_topk_prob:
            picked = picked / picked.sum(-1, keepdim=True)
        x = x[:, :, None, None]
        gate, up = (x @ self.weights[f"{name}.experts.gate_up_proj"].mT).chunk(2, -1)
        out = silu(gate) * up @ self.weights[f"{name}.experts.down_proj"].mT
        return (picked[..., None, None] * out).sum(2)[:, :, 0]

    def logits(self, input_ids, position_ids=None, visible=None, num_loops=None):
        """
        Logits of shape `(batch, length, vocab_size)`.

        `visible`, of shape `(batch, 1, length, length)`, narrows the causal mask: padding, packed documents.
        """
        config = self.config
        length = input_ids.shape[1]
        position_ids = torch.arange(length)[None] if position_ids is None else position_ids
        causal = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
        causal = causal if visible is None else causal & visible
        embeds = self.weights["model.embed_tokens.weight"][input_ids]
        x, global_kv = embeds, []
        for i in range(config.num_encoder_layers):
            x, own_kv = self.layer(x, f"model.encoder.layers.{i}", position_ids, causal)
            global_kv.append(own_kv)
        first = s = x if config.decoder_init == "encoder" else embeds
        default_map = [
            j * config.num_encoder_layers // config.num_decoder_layers for j in range(config.num_decoder_layers)
        ]
        for r in range(num_loops or config.num_loops):
            if config.input_injection == "state" and r > 0:
                s = s + first
            if config.input_injection == "embedding" and (r > 0 or config.decoder_init == "encoder"):
                s = s + embeds
            for j, i in enumerate(config.global_kv_layers or default_map):
                s, _ = self.layer(s, f"model.decoder.layers.{j}", position_ids, causal, global_kv[i])
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        return self.norm(s, "model.norm") @ self.weights[f"{head}.weight"].T
