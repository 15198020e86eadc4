"""The layer once more, in NumPy f64 and loops over tokens: no index table, no shared code, one row at a time."""

import numpy as np


def f64(param):
    return np.asarray(param[...], np.float64)


def rms(x, eps, weight=1.0):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(row, position, rope_dim, base, sign=1):
    """Turns the channel pairs at the end of one row."""
    row = row.copy()
    start = row.shape[-1] - rope_dim
    for pair in range(rope_dim // 2):
        angle = sign * position * base ** (-2 * pair / rope_dim)
        cos, sin = np.cos(angle), np.sin(angle)
        a, b = start + 2 * pair, start + 2 * pair + 1
        row[..., a], row[..., b] = row[..., a] * cos - row[..., b] * sin, row[..., b] * cos + row[..., a] * sin
    return row


def documents(segment_ids):
    """[(first row, length)] of one batch entry."""
    found = []
    for t, segment in enumerate(segment_ids):
        if segment == 0:
            continue
        if t > 0 and segment_ids[t - 1] == segment:
            found[-1][1] += 1
        else:
            found.append([t, 1])
    return found


def compress(module, x, docs, positions, base):
    """[(document, rows pooled so far, compressed row)] of one batch entry."""
    cfg, ratio = module.cfg, module.ratio
    rows = []
    for number, (start, length) in enumerate(docs):
        for group in range(length // ratio):
            tokens = range(start + group * ratio, start + (group + 1) * ratio)
            score = np.stack([x[t] @ f64(module.gate_proj.kernel) for t in tokens]) + f64(module.ape)
            weight = np.exp(score - score.max(0))
            weight /= weight.sum(0)
            pooled = sum(w * (x[t] @ f64(module.kv_proj.kernel)) for w, t in zip(weight, tokens, strict=True))
            row = rms(pooled, cfg.rms_norm_eps, f64(module.norm.weight))
            rows.append((number, tokens[-1], rotate(row, positions[tokens[0]], cfg.qk_rope_head_dim, base)))
    return rows


def attend(query, rows, sink):
    """One head of one token; rows are keys and values."""
    if not rows:
        return np.zeros_like(query)
    rows = np.stack(rows)
    weight = np.exp(rows @ query / np.sqrt(query.shape[0]))
    return weight @ rows / (weight.sum() + np.exp(sink))


def layer(module, x, segment_ids=None, positions=None):
    """Output of a DSv4HybridSelfAttention with plain rotary frequencies; x [batch, tokens, hidden]."""
    cfg, core = module.cfg, module.core_attention
    base, heads, rope_dim = module.rope[0], cfg.num_attention_heads, cfg.qk_rope_head_dim
    x = np.asarray(x, np.float64)
    batch, tokens, _ = x.shape
    segment_ids = np.ones((batch, tokens), int) if segment_ids is None else np.asarray(segment_ids)
    y = np.zeros((batch, tokens, cfg.hidden_size))
    for i in range(batch):
        docs = documents(segment_ids[i])
        position = [0] * tokens
        for start, length in docs:
            position[start : start + length] = range(length)
        if positions is not None:
            position = list(np.broadcast_to(positions, (batch, tokens))[i])
        kv = [rms(row @ f64(module.kv_proj.kernel), cfg.rms_norm_eps, f64(module.kv_norm.weight)) for row in x[i]]
        kv = [rotate(row, p, rope_dim, base) for row, p in zip(kv, position, strict=True)]
        pooled = [] if core.compressor is None else compress(core.compressor, x[i], docs, position, base)
        for number, (start, length) in enumerate(docs):
            for t in range(start, start + length):
                first = start if core.ratio == -1 else max(start, t - cfg.sliding_window + 1)
                rows = kv[first : t + 1] + [row for owner, last, row in pooled if owner == number and last <= t]
                y[i, t] = _token(module, x[i, t], rows, position[t], base, heads)
    return y


def _token(module, x, rows, position, base, heads):
    cfg, rope_dim = module.cfg, module.cfg.qk_rope_head_dim
    q = rms(x @ f64(module.q_down.kernel), cfg.rms_norm_eps, f64(module.q_norm.weight)) @ f64(module.q_up.kernel)
    q = rms(q.reshape(heads, -1), cfg.rms_norm_eps)
    sink = f64(module.core_attention.sink)
    o = np.stack([attend(rotate(q[h], position, rope_dim, base), rows, sink[h]) for h in range(heads)])
    o = rotate(o, position, rope_dim, base, sign=-1)
    if cfg.use_vha_attention:
        o = _postmix(cfg, o, f64(module.postmix_u), f64(module.postmix_v))
    width = heads // cfg.o_groups
    down = f64(module.o_down)
    out = np.concatenate([o[g * width : (g + 1) * width].ravel() @ down[g] for g in range(cfg.o_groups)])
    if cfg.gated_attention:
        out = out / (1 + np.exp(-(x @ f64(module.gate_proj.kernel))))
    return out @ f64(module.o_proj.kernel)


def _postmix(cfg, o, u, v):
    if not cfg.vha_postmix_grouped:
        return o + v @ (u.T @ o)
    width = o.shape[0] // cfg.o_groups
    mixed = [o[g * width : (g + 1) * width] for g in range(cfg.o_groups)]
    return np.concatenate([part + v[g] @ (u[g].T @ part) for g, part in enumerate(mixed)])
