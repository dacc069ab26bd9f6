__global__ void gelu_forward(const float *x, float *y, long n) {
    long i = (long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;  // the last threads have no number
    float u = 0.7978845608f * (x[i] + 0.044715f * x[i] * x[i] * x[i]);
    y[i] = x[i] / (1 + expf(-2 * u));
}
