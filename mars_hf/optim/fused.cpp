// One pass over a parameter, its gradient and its state for the MARS rules; built and called by fused.py.
//
// In the notation of rules.py:
//
//     c = (g + alpha (g - h)) * factor;   m = beta1 m + (1 - beta1) c;   h = g, if it is to be renewed
//
//     adamw     v = beta2 v + (1 - beta2) c^2
//               p = (1 - lr wd) p - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//     lion      p = (1 - lr wd) p - lr sign(m)
//     momentum  p is left to Newton-Schulz
//
// Memory-efficient, without h: m = beta1 m + (1 - beta1) (1 - gamma) g, and lion takes the sign of m + gamma g.
//
// The loops are plain, for the compiler turns them into vector code. What they wait for is memory.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace {

enum Rule { adamw, lion, momentum };

struct Hyper {
  double lr, weight_decay, beta1, beta2, eps, alpha, gamma;
  double clip_c;  // infinite: the factors of the clip are given
  int64_t renew;  // whether h becomes g
};

// Lists of `count` tensors; each tensor is a stretch of memory, in the same order of elements as its companions.
struct Tensors {
  int64_t count;
  const int64_t* sizes;
  void* const* params;
  void* const* grads;
  void* const* exp_avgs;
  void* const* exp_avg_sqs;
  void* const* last_grads;
  const double* steps;  // t
  double* factors;      // of the clip
};

struct bfloat16 {
  uint16_t bits;
};
struct nothing {};  // the dtype of an h that is not kept

template <typename T>
inline T value(T x) {
  return x;
}

inline float value(bfloat16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof bits);
  return result;
}

template <typename T>
inline void store(T& to, T x) {
  to = x;
}

// To nearest, ties to even.
template <typename T>
inline void store(bfloat16& to, T x) {
  float rounded = float(x);
  uint32_t bits;
  std::memcpy(&bits, &rounded, sizeof bits);
  to.bits = uint16_t(x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// m = beta1 m + (1 - beta1) c with weight = 1 - beta1, exact at both ends; rounded as torch's lerp.
template <typename T>
inline T average(T m, T c, T weight) {
  return weight < T(0.5) ? m + weight * (c - m) : c - (c - m) * (1 - weight);
}

// Tensors are cut into blocks of this many elements, which the threads share. A sum is taken block by block, so it does
// not depend on the number of threads.
constexpr int64_t BLOCK = 1 << 14;

// Within a block, memory is asked for this many bytes ahead, a strip at a time: faster by a tenth than the hardware alone.
constexpr int64_t AHEAD = 1024, STRIP = 256, CACHE_LINE = 64;

// Where the clip is measured, tensors go through both passes in groups of about this many elements, a larger one alone:
// what the first pass reads, g and h, is then still in cache in the second.
constexpr int64_t GROUP = 1 << 18;

struct Block {
  int64_t tensor, begin, end;
};

// Of tensors `first` to `last`, the last one excluded.
std::vector<Block> blocks_of(const Tensors& x, int64_t first, int64_t last) {
  std::vector<Block> blocks;
  for (int64_t i = first; i < last; i++)
    for (int64_t begin = 0; begin < x.sizes[i]; begin += BLOCK)
      blocks.push_back({i, begin, std::min(begin + BLOCK, x.sizes[i])});
  return blocks;
}

// Harmless past the end of a tensor: a prefetch of memory that is not there does nothing.
template <bool writes, typename T>
inline void prefetch(const T* x) {
  const char* there = reinterpret_cast<const char*>(x) + AHEAD;
  for (int64_t line = 0; line < STRIP; line += CACHE_LINE) __builtin_prefetch(there + line, writes);
}

template <Rule rule, typename T, typename H>
void update_block(const Tensors& x, const Block& block, const Hyper& hyper) {
  constexpr bool keeps_h = !std::is_same<H, nothing>::value;
  const int64_t i = block.tensor;
  T* __restrict p = static_cast<T*>(x.params[i]);
  const T* __restrict g = static_cast<const T*>(x.grads[i]);
  T* __restrict m = static_cast<T*>(x.exp_avgs[i]);
  T* __restrict v = rule == adamw ? static_cast<T*>(x.exp_avg_sqs[i]) : nullptr;
  H* __restrict h = keeps_h ? static_cast<H*>(x.last_grads[i]) : nullptr;

  const T alpha = hyper.alpha, gamma = hyper.gamma, factor = keeps_h ? x.factors[i] : 1;
  const T beta1 = hyper.beta1, weight = 1 - hyper.beta1, weight_of_g = (1 - hyper.beta1) * (1 - hyper.gamma);
  const T beta2 = hyper.beta2, weight_of_square = 1 - hyper.beta2, eps = hyper.eps;
  const T lr = hyper.lr, decay = 1 - hyper.lr * hyper.weight_decay;
  const T step_size = rule == adamw ? hyper.lr / (1 - std::pow(hyper.beta1, x.steps[i])) : 0;
  const T correction2 = rule == adamw ? std::sqrt(1 - std::pow(hyper.beta2, x.steps[i])) : 1;
  const bool renew = hyper.renew;

  for (int64_t begin = block.begin; begin < block.end; begin += STRIP / sizeof(T)) {
    const int64_t end = std::min<int64_t>(begin + STRIP / sizeof(T), block.end);
    prefetch<false>(g + begin);
    prefetch<true>(m + begin);
    if constexpr (rule != momentum) prefetch<true>(p + begin);
    if constexpr (rule == adamw) prefetch<true>(v + begin);
    if constexpr (keeps_h) prefetch<true>(h + begin);
#pragma omp simd
    for (int64_t j = begin; j < end; j++) {
      T c = g[j];
      if constexpr (keeps_h) c = (g[j] + alpha * (g[j] - value(h[j]))) * factor;
      m[j] = keeps_h ? average(m[j], c, weight) : beta1 * m[j] + weight_of_g * c;
      if constexpr (rule == adamw) {
        v[j] = beta2 * v[j] + weight_of_square * c * c;
        p[j] = decay * p[j] - step_size * m[j] / (std::sqrt(v[j]) / correction2 + eps);
      }
      if constexpr (rule == lion) {
        const T u = keeps_h ? m[j] : m[j] + gamma * g[j];
        p[j] = decay * p[j] - lr * T((u > 0) - (u < 0));
      }
      if constexpr (keeps_h) {
        if (renew) store(h[j], g[j]);
      }
    }
  }
}

// ||c||^2 over a block, before the clip.
template <typename T, typename H>
double squared_norm_of_block(const Tensors& x, const Block& block, double alpha_) {
  const T* __restrict g = static_cast<const T*>(x.grads[block.tensor]);
  const H* __restrict h = static_cast<const H*>(x.last_grads[block.tensor]);
  const T alpha = alpha_;
  double sum = 0;
  for (int64_t begin = block.begin; begin < block.end; begin += STRIP / sizeof(T)) {
    const int64_t end = std::min<int64_t>(begin + STRIP / sizeof(T), block.end);
    prefetch<false>(g + begin);
    prefetch<false>(h + begin);
#pragma omp simd reduction(+ : sum)
    for (int64_t j = begin; j < end; j++) {
      const double c = g[j] + alpha * (g[j] - value(h[j]));
      sum += c * c;
    }
  }
  return sum;
}

// ||c||^2 of tensors `first` to `last`, added to `squares`.
template <typename T, typename H>
void squared_norms(const Tensors& x, int64_t first, int64_t last, double alpha, double* squares, int threads) {
  const std::vector<Block> blocks = blocks_of(x, first, last);
  std::vector<double> sums(blocks.size());
#pragma omp parallel for schedule(static) num_threads(threads) if (blocks.size() > 1)
  for (size_t b = 0; b < blocks.size(); b++) sums[b] = squared_norm_of_block<T, H>(x, blocks[b], alpha);
  for (size_t b = 0; b < blocks.size(); b++) squares[blocks[b].tensor] += sums[b];
}

template <Rule rule, typename T, typename H>
void update_some(const Tensors& x, int64_t first, int64_t last, const Hyper& hyper, int threads) {
  const std::vector<Block> blocks = blocks_of(x, first, last);
#pragma omp parallel for schedule(static) num_threads(threads) if (blocks.size() > 1)
  for (size_t b = 0; b < blocks.size(); b++) update_block<rule, T, H>(x, blocks[b], hyper);
}

template <Rule rule, typename T, typename H>
void update(const Tensors& x, const Hyper& hyper, int threads) {
  if constexpr (!std::is_same<H, nothing>::value) {
    if (std::isfinite(hyper.clip_c)) {
      for (int64_t first = 0, last = 0; first < x.count; first = last) {
        for (int64_t size = 0; last < x.count && (last == first || size + x.sizes[last] <= GROUP); last++)
          size += x.sizes[last];
        std::fill(x.factors + first, x.factors + last, 0);
        squared_norms<T, H>(x, first, last, hyper.alpha, x.factors, threads);
        for (int64_t i = first; i < last; i++) {
          const double factor = hyper.clip_c / std::sqrt(x.factors[i]);
          x.factors[i] = factor > 1 ? 1 : factor;  // nan stays nan
        }
        update_some<rule, T, H>(x, first, last, hyper, threads);
      }
      return;
    }
  }
  update_some<rule, T, H>(x, 0, x.count, hyper, threads);
}

}  // namespace

// What fused.py calls: <pass>_<dtype of the parameters>_<dtype of h>. The norms are added to `squares`.

#define EXPORT_UPDATE(rule, T, H)                                                       \
  extern "C" void rule##_##T##_##H(const Tensors* x, const Hyper* hyper, int threads) { \
    update<rule, T, H>(*x, *hyper, threads);                                            \
  }

#define EXPORT_NORMS(T, H)                                                                                \
  extern "C" void squared_norms_##T##_##H(const Tensors* x, double alpha, double* squares, int threads) { \
    squared_norms<T, H>(*x, 0, x->count, alpha, squares, threads);                                     \
  }

#define EXPORT_WITH_H(T, H)    \
  EXPORT_UPDATE(adamw, T, H)    \
  EXPORT_UPDATE(lion, T, H)     \
  EXPORT_UPDATE(momentum, T, H) \
  EXPORT_NORMS(T, H)

#define EXPORT(T)                 \
  EXPORT_WITH_H(T, T)             \
  EXPORT_WITH_H(T, bfloat16)      \
  EXPORT_UPDATE(lion, T, nothing) \
  EXPORT_UPDATE(momentum, T, nothing)

EXPORT(float)
EXPORT(double)
