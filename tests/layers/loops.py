"""The layers once more, in NumPy f64 and loops over tokens: no index table, no shared code, one row at a time."""

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


def sylvester(size):
    """The Hadamard matrix of a power of two, by doubling."""
    if size == 1:
        return np.ones((1, 1))
    half = sylvester(size // 2)
    return np.block([[half, half], [half, -half]])


def spread(rows):
    """Rows times the orthogonal Hadamard matrix of their width."""
    return rows @ sylvester(rows.shape[-1]) / np.sqrt(rows.shape[-1])


def counted(docs, tokens):
    """Position of every token in its document."""
    position = np.zeros(tokens, int)
    for start, length in docs:
        position[start : start + length] = range(length)
    return position


def compress(module, x, docs, positions, base):
    """[(document, rows pooled so far, compressed row)] of one batch entry."""
    cfg, ratio, width = module.cfg, module.ratio, module.head_dim
    kv, score, ape = x @ f64(module.kv_proj.kernel), x @ f64(module.gate_proj.kernel), f64(module.ape)
    own = slice(width, 2 * width) if module.overlap else slice(0, width)
    rows = []
    for number, (start, length) in enumerate(docs):
        for group in range(length // ratio):
            tokens = range(start + group * ratio, start + (group + 1) * ratio)
            terms = [(score[t, own] + ape[i, own], kv[t, own]) for i, t in enumerate(tokens)]
            if module.overlap and group > 0:
                before = [(score[t - ratio, :width], kv[t - ratio, :width]) for t in tokens]
                terms += [(row + ape[i, :width], value) for i, (row, value) in enumerate(before)]
            scores, values = map(np.stack, zip(*terms, strict=True))
            weight = np.exp(scores - scores.max(0))
            row = rms((weight * values).sum(0) / weight.sum(0), cfg.rms_norm_eps, f64(module.norm.weight))
            row = rotate(row, positions[tokens[0]], cfg.qk_rope_head_dim, base)
            rows.append((number, tokens[-1], spread(row) if module.rotate_channels else row))
    return rows


def packed(module, x, segment_ids, positions=None):
    """What a Compressor returns: the rows of each batch entry, zeros behind them."""
    batch, tokens, _ = x.shape
    rows = np.zeros((batch, tokens // module.ratio, module.head_dim))
    for i in range(batch):
        docs = documents(segment_ids[i])
        position = counted(docs, tokens) if positions is None else np.broadcast_to(positions, (batch, tokens))[i]
        for slot, (*_, row) in enumerate(
            compress(module, np.asarray(x[i], np.float64), docs, position, module.rope[0])
        ):
            rows[i, slot] = row
    return rows


def attend(query, keys, sink, values=None, scale=None):
    """One head of one token; without values, the keys are the values."""
    keys, values = np.stack(keys), np.stack(keys if values is None else values)
    score = keys @ query * (query.shape[0] ** -0.5 if scale is None else scale)
    peak = max(score.max(), sink)
    weight = np.exp(score - peak)
    return weight @ values / (weight.sum() + np.exp(sink - peak))


def index_keys(module, x, positions, base):
    """Keys of an indexer whose candidates are tokens, of one batch entry."""
    cfg = module.cfg
    keys = [rms(row @ f64(module.k_proj.kernel), cfg.rms_norm_eps, f64(module.k_norm.weight)) for row in x]
    return [spread(rotate(row, p, cfg.qk_rope_head_dim, base)) for row, p in zip(keys, positions, strict=True)]


def index_scores(module, x, latent, position, keys, base):
    """Score of every key for one token."""
    cfg, heads = module.cfg, module.cfg.index_n_heads
    q = (latent @ f64(module.q_proj.kernel)).reshape(heads, -1)
    q = [spread(rotate(row, position, cfg.qk_rope_head_dim, base)) for row in q]
    weight = x @ f64(module.weights_proj.kernel)
    scores = [sum(w * max(row @ key, 0.0) for w, row in zip(weight, q, strict=True)) for key in keys]
    return np.array(scores) / np.sqrt(heads * cfg.index_head_dim)


def best(scores, topk):
    """Places of the highest scores; of equal ones the earlier is better."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:topk]


def softmax(scores):
    weight = np.exp(scores - np.max(scores))
    return weight / weight.sum()


def divergence(scores, logits):
    """Of an indexer's softmax from the mean over heads of the attention's; logits [heads, rows]."""
    if not len(scores):
        return 0.0
    target, predicted = np.mean([softmax(row) for row in logits], axis=0), softmax(scores)
    return np.sum(target * (np.log(target + 1e-10) - np.log(predicted + 1e-10)))


def layer(module, x, segment_ids=None, positions=None):
    """Output of a layer with plain rotary frequencies; x [batch, tokens, hidden]."""
    return layer_and_loss(module, x, segment_ids, positions)[0]


def layer_and_loss(module, x, segment_ids=None, positions=None, loss_mask=None):
    """Output of a layer, and its indexer's loss: 0 without an indexer."""
    x = np.asarray(x, np.float64)
    batch, tokens, _ = x.shape
    segment_ids = np.ones((batch, tokens), int) if segment_ids is None else np.asarray(segment_ids)
    entry = _hybrid if hasattr(module, "core_attention") else _latent
    y, kl = np.zeros(x.shape), np.zeros((batch, tokens))
    for i in range(batch):
        docs = documents(segment_ids[i])
        position = counted(docs, tokens) if positions is None else np.broadcast_to(positions, (batch, tokens))[i]
        entry(module, x[i], docs, position, y[i], kl[i])
    counts = (segment_ids != 0) * (1.0 if loss_mask is None else np.asarray(loss_mask, np.float64))
    return y, module.cfg.indexer_loss_coeff * np.sum(counts * kl) / max(np.sum(counts), 1.0)


def _hybrid(module, x, docs, position, y, kl):
    """Fills in the output and the divergences of one batch entry of a DSv4HybridSelfAttention."""
    cfg, core = module.cfg, module.core_attention
    base, heads, rope_dim = module.rope[0], cfg.num_attention_heads, cfg.qk_rope_head_dim
    kv = [rms(row @ f64(module.kv_proj.kernel), cfg.rms_norm_eps, f64(module.kv_norm.weight)) for row in x]
    kv = [rotate(row, p, rope_dim, base) for row, p in zip(kv, position, strict=True)]
    pooled = [] if core.compressor is None else compress(core.compressor, x, docs, position, base)
    keys = [] if core.indexer is None else compress(core.indexer.compressor, x, docs, position, base)
    for number, (start, length) in enumerate(docs):
        for t in range(start, start + length):
            latent = rms(x[t] @ f64(module.q_down.kernel), cfg.rms_norm_eps, f64(module.q_norm.weight))
            q = rms((latent @ f64(module.q_up.kernel)).reshape(heads, -1), cfg.rms_norm_eps)
            q = np.stack([rotate(row, position[t], rope_dim, base) for row in q])
            seen = [i for i, (owner, last, _) in enumerate(pooled) if owner == number and last <= t]
            far = [pooled[i][2] for i in seen]
            if core.indexer is not None and seen:
                scores = index_scores(core.indexer, x[t], latent, position[t], [keys[i][2] for i in seen], base)
                if cfg.indexer_phase == "sparse":
                    chosen = best(scores, cfg.index_topk)
                    scores, far = scores[chosen], [far[i] for i in chosen]
                kl[t] = divergence(scores, q @ np.stack(far).T / np.sqrt(cfg.head_dim))
            first = start if core.ratio == -1 else max(start, t - cfg.sliding_window + 1)
            y[t] = _output(module, x[t], q, kv[first : t + 1] + far, position[t])


def _output(module, x, q, rows, position):
    """Attention, inverse rotation, postmix and projections of one token."""
    cfg, heads, base = module.cfg, module.cfg.num_attention_heads, module.rope[0]
    sink = f64(module.core_attention.sink)
    o = np.stack([attend(q[h], rows, sink[h]) for h in range(heads)])
    o = rotate(o, position, cfg.qk_rope_head_dim, base, sign=-1)
    if cfg.use_vha_attention:
        o = _postmix(cfg, o, f64(module.postmix_u), f64(module.postmix_v))
    width = heads // cfg.o_groups
    down = f64(module.o_down)
    out = np.concatenate([o[g * width : (g + 1) * width].ravel() @ down[g] for g in range(cfg.o_groups)])
    return _gated(module, x, out) @ f64(module.o_proj.kernel)


def _gated(module, x, out):
    if not module.cfg.gated_attention:
        return out
    return out / (1 + np.exp(-(x @ f64(module.gate_proj.kernel))))


def _latent(module, x, docs, position, y, kl):
    """The same of an MQALatentAttention, not absorbed: keys and values of every head are made and read."""
    cfg, indexer, base = module.cfg, module.indexer, module.rope[0]
    heads, rank, rope_dim = cfg.num_attention_heads, cfg.kv_lora_rank, cfg.qk_rope_head_dim
    scale = (cfg.qk_nope_head_dim + rope_dim) ** -0.5
    down, k_up, v_up, sink = f64(module.kv_down.kernel), f64(module.k_up), f64(module.v_up), f64(module.sink)
    keys, values = [], []  # of each token, [heads, channels]
    for row, p in zip(x @ down, position, strict=True):
        c, pe = rms(row[:rank], cfg.rms_norm_eps, f64(module.kv_norm.weight)), rotate(row[rank:], p, rope_dim, base)
        keys.append(np.stack([np.concatenate([k_up[h] @ c, pe]) for h in range(heads)]))
        values.append(np.stack([c @ v_up[h] for h in range(heads)]))
    index = [] if indexer is None else index_keys(indexer, x, position, base)
    is_sparse = indexer is not None and cfg.indexer_phase == "sparse"
    for start, length in docs:
        for t in range(start, start + length):
            latent = rms(x[t] @ f64(module.q_down.kernel), cfg.rms_norm_eps, f64(module.q_norm.weight))
            q = (latent @ f64(module.q_up.kernel)).reshape(heads, -1)
            q = np.stack([rotate(row, position[t], rope_dim, base) for row in q])
            read = list(range(start, t + 1))
            if indexer is not None:
                candidates = read[: -cfg.sliding_window] if is_sparse else read
                scores = index_scores(indexer, x[t], latent, position[t], [index[i] for i in candidates], base)
                if is_sparse:
                    chosen = best(scores, cfg.index_topk)
                    scores, candidates = scores[chosen], [candidates[i] for i in chosen]
                    read = read[-cfg.sliding_window :] + candidates
                logits = [[scale * q[h] @ keys[i][h] for i in candidates] for h in range(heads)]
                kl[t] = divergence(scores, logits)
            heads_out = [
                attend(q[h], [keys[i][h] for i in read], sink[h], [values[i][h] for i in read], scale)
                for h in range(heads)
            ]
            y[t] = _gated(module, x[t], np.concatenate(heads_out)) @ f64(module.o_proj.kernel)


def _postmix(cfg, o, u, v):
    if not cfg.vha_postmix_grouped:
        return o + v @ (u.T @ o)
    width = o.shape[0] // cfg.o_groups
    mixed = [o[g * width : (g + 1) * width] for g in range(cfg.o_groups)]
    return np.concatenate([part + v[g] @ (u[g].T @ part) for g, part in enumerate(mixed)])
