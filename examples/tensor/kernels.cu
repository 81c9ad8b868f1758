// The kernels of the tensor library, compiled at run time once for each kind of storage (STORAGE: 0 float, 1 bfloat16,
// 2 half). They compute in float. Parameters: what is written, what is read, sizes, factors; each group in the order in
// which host.rs names it. Nothing is included.

#if STORAGE == 0
typedef float T;
__device__ __forceinline__ float up(T x) { return x; }
__device__ __forceinline__ T down(float x) { return x; }
#elif STORAGE == 1
typedef unsigned short T;
__device__ __forceinline__ float up(T x) { return __uint_as_float((unsigned)x << 16); }
__device__ __forceinline__ T down(float x) {
    unsigned bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (T)((bits >> 16) | 0x40u); // stays a NaN
    return (T)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);                   // to nearest, ties to even
}
#else
typedef unsigned short T;
__device__ __forceinline__ float up(T x) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
    return wide;
}
__device__ __forceinline__ T down(float x) {
    T narrow;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow) : "f"(x));
    return narrow;
}
#endif

typedef unsigned int u32;
#define KERNEL extern "C" __global__ void
#define EACH(i, n)                                    \
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;    \
    if (i >= (n)) return

// Over the 256 threads of a block; all get the result.
__device__ float block_sum(float x) {
    __shared__ float parts[8];
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.0f;
    for (int i = 0; i < 8; i++) sum += parts[i];
    return sum;
}
__device__ float block_max(float x) {
    __shared__ float parts[8];
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    float most = parts[0];
    for (int i = 1; i < 8; i++) most = fmaxf(most, parts[i]);
    return most;
}
// Over the 32 threads (y) that share a column (x) of a block of 32 by 32; those with y == 0 get the result.
__device__ float column_sum(float x) {
    __shared__ float parts[32][33];
    __syncthreads();
    parts[threadIdx.y][threadIdx.x] = x;
    __syncthreads();
    float sum = 0.0f;
    if (threadIdx.y == 0)
        for (int i = 0; i < 32; i++) sum += parts[i][threadIdx.x];
    return sum;
}

KERNEL fill(T *out, u32 n, float value) { EACH(i, n); out[i] = down(value); }
KERNEL add(T *out, const T *a, const T *b, u32 n) { EACH(i, n); out[i] = down(up(a[i]) + up(b[i])); }
KERNEL mul(T *out, const T *a, const T *b, u32 n) { EACH(i, n); out[i] = down(up(a[i]) * up(b[i])); }
KERNEL scale(T *out, const T *x, u32 n, float factor) { EACH(i, n); out[i] = down(up(x[i]) * factor); }
KERNEL relu(T *out, const T *x, u32 n) { EACH(i, n); out[i] = down(fmaxf(up(x[i]), 0.0f)); }
KERNEL relu_back(T *dx, const T *x, const T *dy, u32 n) { EACH(i, n); dx[i] = up(x[i]) > 0.0f ? dy[i] : down(0.0f); }
KERNEL widen(float *out, const T *x, u32 n) { EACH(i, n); out[i] = up(x[i]); }
KERNEL narrow(T *out, const float *x, u32 n) { EACH(i, n); out[i] = down(x[i]); }

#define GELU_A 0.7978845608f // sqrt(2 / pi)
#define GELU_B 0.044715f
KERNEL gelu(T *out, const T *x, u32 n) {
    EACH(i, n);
    float v = up(x[i]);
    out[i] = down(0.5f * v * (1.0f + tanhf(GELU_A * (v + GELU_B * v * v * v))));
}
KERNEL gelu_back(T *dx, const T *x, const T *dy, u32 n) {
    EACH(i, n);
    float v = up(x[i]), t = tanhf(GELU_A * (v + GELU_B * v * v * v));
    float slope = 0.5f * (1.0f + t) + 0.5f * v * (1.0f - t * t) * GELU_A * (1.0f + 3.0f * GELU_B * v * v);
    dx[i] = down(up(dy[i]) * slope);
}

KERNEL add_bias(T *out, const T *x, const T *bias, u32 n, u32 cols) {
    EACH(i, n);
    out[i] = down(up(x[i]) + up(bias[i % cols]));
}
KERNEL sum_rows(T *out, const T *x, u32 rows, u32 cols) {
    u32 col = blockIdx.x * 32 + threadIdx.x;
    float sum = 0.0f;
    if (col < cols)
        for (u32 row = threadIdx.y; row < rows; row += 32) sum += up(x[(size_t)row * cols + col]);
    sum = column_sum(sum);
    if (threadIdx.y == 0 && col < cols) out[col] = down(sum);
}

// A row of `cols` columns sees those up to its own position, the last of `queries` rows all, if `causal`.
__device__ __forceinline__ u32 seen(u32 row, u32 cols, u32 queries, u32 causal) {
    return causal ? cols - queries + row % queries + 1 : cols;
}
KERNEL softmax(T *out, const T *x, u32 rows, u32 cols, u32 queries, u32 causal, float factor) {
    u32 limit = seen(blockIdx.x, cols, queries, causal);
    x += (size_t)blockIdx.x * cols;
    out += (size_t)blockIdx.x * cols;
    float most = -3.0e38f, sum = 0.0f;
    for (u32 i = threadIdx.x; i < limit; i += 256) most = fmaxf(most, up(x[i]) * factor);
    most = block_max(most);
    for (u32 i = threadIdx.x; i < limit; i += 256) sum += expf(up(x[i]) * factor - most);
    sum = block_sum(sum);
    for (u32 i = threadIdx.x; i < cols; i += 256)
        out[i] = down(i < limit ? expf(up(x[i]) * factor - most) / sum : 0.0f);
}
KERNEL softmax_back(T *dx, const T *y, const T *dy, u32 rows, u32 cols, float factor) {
    size_t start = (size_t)blockIdx.x * cols;
    float dot = 0.0f;
    for (u32 i = threadIdx.x; i < cols; i += 256) dot += up(y[start + i]) * up(dy[start + i]);
    dot = block_sum(dot);
    for (u32 i = threadIdx.x; i < cols; i += 256)
        dx[start + i] = down(up(y[start + i]) * (up(dy[start + i]) - dot) * factor);
}

// `stats`: mean and 1 / deviation, of each row.
KERNEL layer_norm(T *out, float *stats, const T *x, const T *gain, const T *bias, u32 rows, u32 cols, float eps) {
    size_t start = (size_t)blockIdx.x * cols;
    float sum = 0.0f, squares = 0.0f;
    for (u32 i = threadIdx.x; i < cols; i += 256) sum += up(x[start + i]);
    float mean = block_sum(sum) / cols;
    for (u32 i = threadIdx.x; i < cols; i += 256) {
        float d = up(x[start + i]) - mean;
        squares += d * d;
    }
    float inverse = rsqrtf(block_sum(squares) / cols + eps);
    for (u32 i = threadIdx.x; i < cols; i += 256)
        out[start + i] = down((up(x[start + i]) - mean) * inverse * up(gain[i]) + up(bias[i]));
    if (threadIdx.x == 0) {
        stats[2 * blockIdx.x] = mean;
        stats[2 * blockIdx.x + 1] = inverse;
    }
}
KERNEL layer_norm_back(T *dx, const T *x, const T *gain, const float *stats, const T *dy, u32 rows, u32 cols) {
    size_t start = (size_t)blockIdx.x * cols;
    float mean = stats[2 * blockIdx.x], inverse = stats[2 * blockIdx.x + 1], sum = 0.0f, dot = 0.0f;
    for (u32 i = threadIdx.x; i < cols; i += 256) {
        float g = up(dy[start + i]) * up(gain[i]);
        sum += g;
        dot += g * (up(x[start + i]) - mean) * inverse;
    }
    sum = block_sum(sum) / cols;
    dot = block_sum(dot) / cols;
    for (u32 i = threadIdx.x; i < cols; i += 256) {
        float g = up(dy[start + i]) * up(gain[i]), normal = (up(x[start + i]) - mean) * inverse;
        dx[start + i] = down((g - sum - normal * dot) * inverse);
    }
}
// For both norms: `stats` are by column if `by_column`, else by row.
KERNEL norm_factors_back(T *dgain, T *dbias, const T *x, const float *stats, const T *dy, u32 rows, u32 cols,
                         u32 by_column) {
    u32 col = blockIdx.x * 32 + threadIdx.x;
    float gain = 0.0f, bias = 0.0f;
    if (col < cols)
        for (u32 row = threadIdx.y; row < rows; row += 32) {
            size_t i = (size_t)row * cols + col, s = by_column ? col : row;
            bias += up(dy[i]);
            gain += up(dy[i]) * (up(x[i]) - stats[2 * s]) * stats[2 * s + 1];
        }
    gain = column_sum(gain);
    bias = column_sum(bias);
    if (threadIdx.y == 0 && col < cols) {
        dgain[col] = down(gain);
        dbias[col] = down(bias);
    }
}
KERNEL batch_stats(float *stats, const T *x, u32 rows, u32 cols, float eps) {
    __shared__ float means[32];
    u32 col = blockIdx.x * 32 + threadIdx.x;
    float sum = 0.0f, squares = 0.0f;
    if (col < cols)
        for (u32 row = threadIdx.y; row < rows; row += 32) sum += up(x[(size_t)row * cols + col]);
    sum = column_sum(sum);
    if (threadIdx.y == 0) means[threadIdx.x] = sum / rows;
    __syncthreads();
    float mean = means[threadIdx.x];
    if (col < cols)
        for (u32 row = threadIdx.y; row < rows; row += 32) {
            float d = up(x[(size_t)row * cols + col]) - mean;
            squares += d * d;
        }
    squares = column_sum(squares);
    if (threadIdx.y == 0 && col < cols) {
        stats[2 * col] = mean;
        stats[2 * col + 1] = rsqrtf(squares / rows + eps);
    }
}
KERNEL batch_norm(T *out, const T *x, const float *stats, const T *gain, const T *bias, u32 n, u32 cols) {
    EACH(i, n);
    u32 c = i % cols;
    out[i] = down((up(x[i]) - stats[2 * c]) * stats[2 * c + 1] * up(gain[c]) + up(bias[c]));
}
KERNEL batch_norm_back(T *dx, const T *x, const float *stats, const T *gain, const T *dy, const T *dgain,
                       const T *dbias, u32 n, u32 cols) {
    EACH(i, n);
    u32 c = i % cols;
    float rows = (float)(n / cols), inverse = stats[2 * c + 1], normal = (up(x[i]) - stats[2 * c]) * inverse;
    dx[i] = down(up(gain[c]) * inverse * (up(dy[i]) - up(dbias[c]) / rows - normal * up(dgain[c]) / rows));
}

// The loss of each row, and its gradient times `factor`.
KERNEL cross_entropy(float *loss, T *dx, const T *x, const u32 *targets, u32 rows, u32 cols, float factor) {
    size_t start = (size_t)blockIdx.x * cols;
    u32 target = targets[blockIdx.x];
    float most = -3.0e38f, sum = 0.0f;
    for (u32 i = threadIdx.x; i < cols; i += 256) most = fmaxf(most, up(x[start + i]));
    most = block_max(most);
    for (u32 i = threadIdx.x; i < cols; i += 256) sum += expf(up(x[start + i]) - most);
    sum = block_sum(sum);
    for (u32 i = threadIdx.x; i < cols; i += 256)
        dx[start + i] = down((expf(up(x[start + i]) - most) / sum - (i == target ? 1.0f : 0.0f)) * factor);
    if (threadIdx.x == 0) loss[blockIdx.x] = logf(sum) + most - up(x[start + target]);
}

KERNEL embedding(T *out, const T *table, const u32 *ids, u32 n, u32 cols) {
    EACH(i, n);
    out[i] = table[(size_t)ids[i / cols] * cols + i % cols];
}
KERNEL one_hot(T *out, const u32 *ids, u32 n, u32 cols) {
    EACH(i, n);
    out[i] = down(ids[i / cols] == i % cols ? 1.0f : 0.0f);
}
// a, b, c, d in memory become a, c, b, d.
KERNEL swap_axes(T *out, const T *x, u32 n, u32 b, u32 c, u32 d) {
    EACH(i, n);
    u32 l = i % d, k = i / d % b, j = i / d / b % c, rest = i / d / b / c;
    out[i] = x[((size_t)(rest * b + k) * c + j) * d + l];
}

// Images are batch, height, width, channels. `columns` has a row for each output pixel.
KERNEL im2col(T *columns, const T *x, u32 n, u32 height, u32 width, u32 channels, u32 side, u32 stride, u32 padding,
              u32 out_height, u32 out_width) {
    EACH(i, n);
    u32 ch = i % channels, kx = i / channels % side, ky = i / channels / side % side;
    u32 pixel = i / channels / side / side, ox = pixel % out_width, oy = pixel / out_width % out_height;
    u32 image = pixel / out_width / out_height;
    int y = (int)(oy * stride + ky) - (int)padding, xx = (int)(ox * stride + kx) - (int)padding;
    bool inside = y >= 0 && xx >= 0 && y < (int)height && xx < (int)width;
    columns[i] = inside ? x[(((size_t)image * height + y) * width + xx) * channels + ch] : down(0.0f);
}
KERNEL col2im(T *dx, const T *columns, u32 n, u32 height, u32 width, u32 channels, u32 side, u32 stride, u32 padding,
              u32 out_height, u32 out_width) {
    EACH(i, n);
    u32 ch = i % channels, x = i / channels % width, y = i / channels / width % height;
    u32 image = i / channels / width / height;
    float sum = 0.0f;
    for (u32 ky = 0; ky < side; ky++)
        for (u32 kx = 0; kx < side; kx++) {
            int sy = (int)(y + padding) - (int)ky, sx = (int)(x + padding) - (int)kx;
            if (sy < 0 || sx < 0 || sy % (int)stride || sx % (int)stride) continue;
            u32 oy = sy / stride, ox = sx / stride;
            if (oy >= out_height || ox >= out_width) continue;
            size_t pixel = ((size_t)image * out_height + oy) * out_width + ox;
            sum += up(columns[((pixel * side + ky) * side + kx) * channels + ch]);
        }
    dx[i] = down(sum);
}
// `from` is where in the input each output comes from.
KERNEL max_pool(T *out, u32 *from, const T *x, u32 n, u32 height, u32 width, u32 channels, u32 side, u32 stride,
                u32 padding, u32 out_height, u32 out_width) {
    EACH(i, n);
    u32 ch = i % channels, ox = i / channels % out_width, oy = i / channels / out_width % out_height;
    u32 image = i / channels / out_width / out_height, best = 0;
    float most = -3.0e38f;
    for (u32 ky = 0; ky < side; ky++)
        for (u32 kx = 0; kx < side; kx++) {
            int y = (int)(oy * stride + ky) - (int)padding, xx = (int)(ox * stride + kx) - (int)padding;
            if (y < 0 || xx < 0 || y >= (int)height || xx >= (int)width) continue;
            u32 place = ((image * height + y) * width + xx) * channels + ch;
            if (up(x[place]) > most) { most = up(x[place]); best = place; }
        }
    out[i] = down(most);
    from[i] = best;
}
KERNEL max_pool_back(T *dx, const u32 *from, const T *dy, u32 n, u32 height, u32 width, u32 channels, u32 side,
                     u32 stride, u32 padding, u32 out_height, u32 out_width) {
    EACH(i, n);
    u32 ch = i % channels, x = i / channels % width, y = i / channels / width % height;
    u32 image = i / channels / width / height;
    float sum = 0.0f;
    for (u32 ky = 0; ky < side; ky++)
        for (u32 kx = 0; kx < side; kx++) {
            int sy = (int)(y + padding) - (int)ky, sx = (int)(x + padding) - (int)kx;
            if (sy < 0 || sx < 0 || sy % (int)stride || sx % (int)stride) continue;
            u32 oy = sy / stride, ox = sx / stride;
            if (oy >= out_height || ox >= out_width) continue;
            u32 place = ((image * out_height + oy) * out_width + ox) * channels + ch;
            if (from[place] == i) sum += up(dy[place]);
        }
    dx[i] = down(sum);
}
// The mean of the `pixels` rows of each image, and back.
KERNEL average(T *out, const T *x, u32 n, u32 pixels, u32 channels) {
    EACH(i, n);
    float sum = 0.0f;
    for (u32 p = 0; p < pixels; p++) sum += up(x[((size_t)(i / channels) * pixels + p) * channels + i % channels]);
    out[i] = down(sum / pixels);
}
KERNEL average_back(T *dx, const T *dy, u32 n, u32 pixels, u32 channels) {
    EACH(i, n);
    dx[i] = down(up(dy[i / channels / pixels * channels + i % channels]) / pixels);
}

KERNEL sgd(float *weights, float *velocity, const T *grad, u32 n, float rate, float momentum, float factor) {
    EACH(i, n);
    velocity[i] = momentum * velocity[i] + up(grad[i]) * factor;
    weights[i] -= rate * velocity[i];
}
KERNEL adam(float *weights, float *mean, float *square, const T *grad, u32 n, float rate, float decay1, float decay2,
            float factor) {
    EACH(i, n);
    float g = up(grad[i]) * factor;
    mean[i] = decay1 * mean[i] + (1.0f - decay1) * g;
    square[i] = decay2 * square[i] + (1.0f - decay2) * g * g;
    weights[i] -= rate * mean[i] / (sqrtf(square[i]) + 1e-8f);
}
// `flag` becomes 1 if there is an infinity or a NaN.
KERNEL find_overflow(float *flag, const T *x, u32 n) {
    EACH(i, n);
    if (!(fabsf(up(x[i])) <= 3.0e38f)) flag[0] = 1.0f;
}
