// One pass of a Llama-shaped decoder over the rows of many sessions, on all threads from the first layer to the logits.
// Threads take columns as they come and meet five times a layer. Nothing is known here of Python, torch or sessions.
// Invariant: a row's logits depend on its own token, position and cache, bit for bit: not on its batch mates, the number
// of rows or of threads.
#include <algorithm>
#include <cmath>
#include <memory>

#include "attention.h"
#include "product.h"
#include "threads.h"

extern "C" {

// All arrays float32 and contiguous; biases may be null. Weights [out, in] as torch holds them.
struct Layer {
    const float *norm_attention, *qkv, *qkv_bias, *out, *out_bias;
    const float *norm_mlp, *gate_up, *gate_up_bias, *down, *down_bias;
    float *keys, *values;  // [pages * page_size, kv_heads, dim]
};

struct Model {
    int64_t layers, width, heads, kv_heads, dim, inner, vocab, page_size;
    float epsilon, scale;
    const Layer* layer;
    const float *norm, *head, *head_bias;
};

struct Batch {
    int64_t rows, table_width, logit_count;
    const int64_t *slots, *visible, *session;  // [rows]; `visible` counts the keys that a row sees, itself included
    const int64_t *tables, *logit_rows;        // [sessions, table_width], [logit_count]
    const float *cosines, *sines;              // [rows, dim]
    float *hidden, *logits;                    // [rows, width] in and overwritten; [logit_count, vocab] out
    float* const* entering;                    // [layers], each null or [rows, width]: gets what enters that layer
};

}  // extern "C"

namespace {

constexpr int64_t CHUNK = 16, HEAD_CHUNK = 64;  // columns that a thread takes at once

inline float bias_at(const float* bias, int64_t i) { return bias ? bias[i] : 0.0f; }

// x / rms(x) * weight
void normalise(const float* x, const float* weight, int64_t width, float epsilon, float* out) {
    const float scale = 1 / std::sqrt(dot(x, x, width) / width + epsilon);
    for (int64_t i = 0; i < width; ++i) out[i] = x[i] * scale * weight[i];
}

// x * cos + rotate_half(x) * sin
void rotate(const float* x, const float* cosine, const float* sine, int64_t dim, float* out) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; ++i) {
        out[i] = x[i] * cosine[i] - x[i + half] * sine[i];
        out[i + half] = x[i + half] * cosine[i + half] + x[i] * sine[i + half];
    }
}

class Pass {
  public:
    Pass(Threads& threads, const Model& model, const Batch& batch)
        : threads_(threads), m_(model), b_(batch), tickets_(new Tickets[5 * model.layers + 1]) {
        const int64_t longest = *std::max_element(b_.visible, b_.visible + b_.rows);
        splits_ = (longest + SPLIT - 1) / SPLIT;
        queries_.reset(new float[b_.rows * m_.heads * m_.dim]);
        partials_.reset(new float[b_.rows * splits_ * m_.heads * (m_.dim + 2)]);
        inner_.reset(new float[b_.rows * m_.inner]);
    }

    void run() {
        threads_.run([this](int thread) { work(thread); });
    }

  private:
    void work(int thread) {
        const int64_t widest = std::max(m_.width, m_.heads * m_.dim);
        std::unique_ptr<float[]> input(new float[b_.rows * widest]);
        std::unique_ptr<float[]> scratch(new float[b_.rows * std::max(m_.dim, 2 * CHUNK)]);
        for (int64_t i = 0; i < m_.layers; ++i) {
            const Layer& layer = m_.layer[i];
            Tickets* tickets = &tickets_[5 * i];
            if (thread == 0 && b_.entering[i]) std::copy(b_.hidden, b_.hidden + b_.rows * m_.width, b_.entering[i]);
            normalise_rows(layer.norm_attention, input.get());
            tickets[0].each(m_.heads + 2 * m_.kv_heads, [&](int64_t head) { project(layer, head, input.get(), scratch.get()); });
            threads_.barrier();
            tickets[1].each(b_.rows * splits_ * m_.kv_heads, [&](int64_t task) { attend(layer, task); });
            threads_.barrier();
            join(input.get());
            add_product(tickets[2], input.get(), m_.heads * m_.dim, layer.out, layer.out_bias);
            threads_.barrier();
            normalise_rows(layer.norm_mlp, input.get());
            tickets[3].each(chunks(m_.inner, CHUNK), [&](int64_t chunk) { gate(layer, chunk, input.get(), scratch.get()); });
            threads_.barrier();
            add_product(tickets[4], inner_.get(), m_.inner, layer.down, layer.down_bias);
            threads_.barrier();
        }
        predict(tickets_[5 * m_.layers], input.get());
    }

    static int64_t chunks(int64_t columns, int64_t size) { return (columns + size - 1) / size; }

    void normalise_rows(const float* weight, float* out) {
        for (int64_t r = 0; r < b_.rows; ++r)
            normalise(b_.hidden + r * m_.width, weight, m_.width, m_.epsilon, out + r * m_.width);
    }

    // One head of queries, keys or values, for all rows: queries wait, keys and values go to their pages.
    void project(const Layer& layer, int64_t head, const float* input, float* scratch) {
        const int64_t dim = m_.dim, first = head * dim;
        product(input, b_.rows, m_.width, layer.qkv, m_.width, first, first + dim, [&](int64_t r, int64_t c, float v) {
            scratch[r * dim + c - first] = v + bias_at(layer.qkv_bias, c);
        });
        for (int64_t r = 0; r < b_.rows; ++r) {
            const float* from = scratch + r * dim;
            const float *cosine = b_.cosines + r * dim, *sine = b_.sines + r * dim;
            const int64_t slot = b_.slots[r] * m_.kv_heads, kv = head - m_.heads;
            if (kv < 0)
                rotate(from, cosine, sine, dim, &queries_[(r * m_.heads + head) * dim]);
            else if (kv < m_.kv_heads)
                rotate(from, cosine, sine, dim, layer.keys + (slot + kv) * dim);
            else
                std::copy(from, from + dim, layer.values + (slot + kv - m_.kv_heads) * dim);
        }
    }

    float* partial(int64_t row, int64_t split, int64_t head) {
        return &partials_[((row * splits_ + split) * m_.heads + head) * (m_.dim + 2)];
    }

    void attend(const Layer& layer, int64_t task) {
        const int64_t head = task % m_.kv_heads, split = task / m_.kv_heads % splits_;
        const int64_t row = task / m_.kv_heads / splits_, group = m_.heads / m_.kv_heads;
        const int64_t first = split * SPLIT, last = std::min(first + SPLIT, b_.visible[row]);
        if (first >= last) return;
        const Keys keys{layer.keys, layer.values, b_.tables + b_.session[row] * b_.table_width,
                        m_.page_size, m_.kv_heads, m_.dim};
        attend_split(&queries_[(row * m_.heads + head * group) * m_.dim], group, keys, head, first, last, m_.scale,
                     partial(row, split, head * group));
    }

    // Every thread joins all rows for itself: cheaper than meeting once more.
    void join(float* out) {
        for (int64_t r = 0; r < b_.rows; ++r)
            for (int64_t h = 0; h < m_.heads; ++h)
                join_splits(partial(r, 0, h), (b_.visible[r] + SPLIT - 1) / SPLIT, m_.heads * (m_.dim + 2), m_.dim,
                            out + (r * m_.heads + h) * m_.dim);
    }

    // hidden += x . W^T + bias
    void add_product(Tickets& tickets, const float* x, int64_t depth, const float* weight, const float* bias) {
        tickets.each(chunks(m_.width, CHUNK), [&](int64_t chunk) {
            product(x, b_.rows, depth, weight, depth, chunk * CHUNK, std::min((chunk + 1) * CHUNK, m_.width),
                    [&](int64_t r, int64_t c, float v) { b_.hidden[r * m_.width + c] += v + bias_at(bias, c); });
        });
    }

    // silu(gate) * up for some columns of all rows
    void gate(const Layer& layer, int64_t chunk, const float* input, float* scratch) {
        const int64_t first = chunk * CHUNK, last = std::min(first + CHUNK, m_.inner);
        for (int64_t part = 0; part < 2; ++part) {
            const int64_t shift = part * m_.inner;
            product(input, b_.rows, m_.width, layer.gate_up, m_.width, first + shift, last + shift,
                    [&](int64_t r, int64_t c, float v) {
                        scratch[(2 * r + part) * CHUNK + c - shift - first] = v + bias_at(layer.gate_up_bias, c);
                    });
        }
        for (int64_t r = 0; r < b_.rows; ++r) {
            const float *gates = scratch + 2 * r * CHUNK, *ups = gates + CHUNK;
            float out[CHUNK];
            for (int64_t i = 0; i < CHUNK; i += LANES) {
                const vec x = load(gates + i);
                store(out + i, x / (exp(-x) + 1.0f) * load(ups + i));
            }
            std::copy(out, out + (last - first), &inner_[r * m_.inner + first]);
        }
    }

    void predict(Tickets& tickets, float* input) {
        if (b_.logit_count == 0) return;
        for (int64_t i = 0; i < b_.logit_count; ++i)
            normalise(b_.hidden + b_.logit_rows[i] * m_.width, m_.norm, m_.width, m_.epsilon, input + i * m_.width);
        tickets.each(chunks(m_.vocab, HEAD_CHUNK), [&](int64_t chunk) {
            product(input, b_.logit_count, m_.width, m_.head, m_.width, chunk * HEAD_CHUNK,
                    std::min((chunk + 1) * HEAD_CHUNK, m_.vocab), [&](int64_t r, int64_t c, float v) {
                        b_.logits[r * m_.vocab + c] = v + bias_at(m_.head_bias, c);
                    });
        });
    }

    Threads& threads_;
    const Model& m_;
    const Batch& b_;
    std::unique_ptr<Tickets[]> tickets_;
    int64_t splits_;
    std::unique_ptr<float[]> queries_, partials_, inner_;
};

}  // namespace

extern "C" {

void* outrider_threads(int count) { return new Threads(count); }

void outrider_threads_end(void* threads) { delete static_cast<Threads*>(threads); }

void outrider_pass(void* threads, const Model* model, const Batch* batch) {
    Pass(*static_cast<Threads*>(threads), *model, *batch).run();
}
}
