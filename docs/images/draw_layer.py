"""Draws docs/images/layer.png: the data flow of DSv4HybridSelfAttention, and what each fusion takes out of it."""

import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

INK, FUSED, PLAIN, GONE = "#1f2933", "#2f7d5d", "#eef2f6", "#c0392b"


def box(ax, x, y, text, width=2.7, color=PLAIN, ink=INK):
    ax.add_patch(plt.Rectangle((x - width / 2, y - 0.3), width, 0.6, facecolor=color, edgecolor=ink, linewidth=1))
    ax.text(x, y, text, ha="center", va="center", fontsize=9, color=ink if color == PLAIN else "white")


def arrow(ax, start, end, label="", offset=(0.1, 0), ink=INK):
    ax.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": ink, "linewidth": 1.2})
    x, y = (start[0] + end[0]) / 2 + offset[0], (start[1] + end[1]) / 2 + offset[1]
    ax.text(x, y, label, fontsize=7.5, va="center", color=ink)


def main():
    figure, ax = plt.subplots(figsize=(10, 8.2))
    ax.set_xlim(-0.4, 11.4)
    ax.set_ylim(-0.2, 9.3)
    ax.axis("off")
    tokens, heads, dim = 16384, 64, 512
    q_shape, kv_shape = f"{tokens} x {heads} x {dim}", f"{tokens} x {dim}"

    box(ax, 4.5, 8.9, "hidden states x", 2.2)
    box(ax, 1.6, 7.7, "Wq_down, norm, Wq_up, norm", 3.2)
    box(ax, 4.9, 7.7, "Wkv, norm")
    box(ax, 7.8, 7.7, "compressor (ratio 128)")
    for x in (1.6, 4.9, 7.8):
        arrow(ax, (4.5, 8.6), (x, 8.0))
    box(ax, 1.6, 6.6, "RoPE of the last 64 channels", 3.2)
    box(ax, 4.9, 6.6, "RoPE of the last 64")
    arrow(ax, (1.6, 7.4), (1.6, 6.9), q_shape)
    arrow(ax, (4.9, 7.4), (4.9, 6.9), kv_shape)
    box(ax, 9.6, 6.6, "ids: window | compressed", 3.0)
    box(ax, 9.6, 5.5, "local to flat ids", 3.0, FUSED)
    arrow(ax, (9.6, 6.3), (9.6, 5.8), f"{tokens} x {128 + tokens // 128}")
    ax.text(9.6, 5.03, "fuse_kv_index_remap: one kernel", ha="center", fontsize=8, color=FUSED)
    box(ax, 4.5, 4.9, "sparse attention: one KV head, a sink per head", 4.8)
    arrow(ax, (1.6, 6.3), (3.3, 5.2), q_shape, (-1.75, -0.1))
    arrow(ax, (4.9, 6.3), (4.9, 5.2))
    arrow(ax, (7.8, 7.4), (5.9, 5.2), f"{tokens // 128} x {dim}", (0.45, 0.25))
    arrow(ax, (8.1, 5.4), (6.95, 5.0))

    ax.add_patch(plt.Rectangle((2.1, 2.2), 4.8, 2.0, facecolor="#e7f4ee", edgecolor=FUSED, linestyle="--"))
    ax.text(7.1, 3.5, "fuse_inv_rope: one kernel,\nreads O, writes M X", fontsize=8.5, color=FUSED, va="center")
    box(ax, 4.5, 3.8, "inverse RoPE of the last 64 channels", 4.1, FUSED)
    box(ax, 4.5, 2.6, "VHA postmix: M X[t], M = V U^T + I", 4.1, FUSED)
    arrow(ax, (4.5, 4.6), (4.5, 4.1), f"O  {q_shape}  (1 GiB)")
    arrow(ax, (4.5, 3.5), (4.5, 2.9), "X  1 GiB, gone when fused", ink=GONE)
    box(ax, 4.5, 1.3, "grouped output projection (times gate)", 4.1)
    arrow(ax, (4.5, 2.3), (4.5, 1.6), f"M X  {q_shape}")
    box(ax, 4.5, 0.2, "o_proj")
    arrow(ax, (4.5, 1.0), (4.5, 0.5), f"{tokens} x 8 x 1024")
    figure.savefig(pathlib.Path(__file__).with_name("layer.png"), dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
