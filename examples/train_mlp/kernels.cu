// The kernels of the example `train_mlp`. Simple rather than fast: what the example shows is the memory.
//
// kernels.ptx is made of this file by scripts/build-example-kernels.sh and checked in, so that neither building
// nor running the example needs a CUDA toolkit: the GPU's driver translates the PTX when the program starts.
//
// Matrices lie row by row. Every kernel does nothing in the threads beyond its output.

#define TILE 16

// out (m x n) = a (m x k) times b (k x n); a flag says that a factor lies transposed.
// A block of 16 x 16 threads makes a tile of the output and goes along k in tiles that it keeps in shared memory.
extern "C" __global__ void matmul(float *out, const float *a, const float *b, unsigned m, unsigned n, unsigned k,
                                  unsigned a_transposed, unsigned b_transposed) {
    __shared__ float tile_a[TILE][TILE + 1];
    __shared__ float tile_b[TILE][TILE + 1];
    unsigned x = threadIdx.x, y = threadIdx.y;
    unsigned row = blockIdx.y * TILE + y, col = blockIdx.x * TILE + x;
    float sum = 0.0f;
    for (unsigned start = 0; start < k; start += TILE) {
        unsigned a_col = start + x, b_row = start + y;
        unsigned a_at = a_transposed ? a_col * m + row : row * k + a_col;
        unsigned b_at = b_transposed ? col * k + b_row : b_row * n + col;
        tile_a[y][x] = row < m && a_col < k ? a[a_at] : 0.0f;
        tile_b[y][x] = b_row < k && col < n ? b[b_at] : 0.0f;
        __syncthreads();
        for (unsigned i = 0; i < TILE; i++) {
            sum += tile_a[y][i] * tile_b[i][x];
        }
        __syncthreads();
    }
    if (row < m && col < n) {
        out[row * n + col] = sum;
    }
}

static __device__ unsigned thread_number() {
    return blockIdx.x * blockDim.x + threadIdx.x;
}

extern "C" __global__ void fill(float *out, float value, unsigned count) {
    unsigned i = thread_number();
    if (i < count) {
        out[i] = value;
    }
}

extern "C" __global__ void add_bias(float *x, const float *bias, unsigned count, unsigned cols, unsigned relu) {
    unsigned i = thread_number();
    if (i < count) {
        float value = x[i] + bias[i % cols];
        x[i] = relu ? fmaxf(value, 0.0f) : value;
    }
}

extern "C" __global__ void relu_backward(float *grad, const float *output, unsigned count) {
    unsigned i = thread_number();
    if (i < count && output[i] <= 0.0f) {
        grad[i] = 0.0f;
    }
}

// One thread for each column.
extern "C" __global__ void sum_rows(float *out, const float *x, unsigned rows, unsigned cols) {
    unsigned col = thread_number();
    if (col < cols) {
        float sum = 0.0f;
        for (unsigned row = 0; row < rows; row++) {
            sum += x[row * cols + col];
        }
        out[col] = sum;
    }
}

// One thread for each row: score gets the row's loss and whether it is a hit, grad the mean loss's gradient.
extern "C" __global__ void cross_entropy(float *score, float *grad, const float *logits, const unsigned *labels,
                                         unsigned rows, unsigned cols) {
    unsigned row = thread_number();
    if (row >= rows) {
        return;
    }
    const float *logit = logits + row * cols;
    unsigned label = labels[row];
    float largest = logit[0], own = 0.0f;
    for (unsigned col = 0; col < cols; col++) {
        largest = fmaxf(largest, logit[col]);
        own = col == label ? logit[col] : own;
    }
    float sum = 0.0f;
    for (unsigned col = 0; col < cols; col++) {
        sum += __expf(logit[col] - largest);
    }
    score[2 * row] = __logf(sum) + largest - own;
    score[2 * row + 1] = own >= largest ? 1.0f : 0.0f;
    for (unsigned col = 0; col < cols; col++) {
        float share = __expf(logit[col] - largest) / sum;
        grad[row * cols + col] = (share - (col == label ? 1.0f : 0.0f)) / (float)rows;
    }
}

extern "C" __global__ void sgd(float *weights, float *velocity, const float *grad, unsigned count, float rate,
                               float momentum) {
    unsigned i = thread_number();
    if (i < count) {
        float v = momentum * velocity[i] + grad[i];
        velocity[i] = v;
        weights[i] -= rate * v;
    }
}
