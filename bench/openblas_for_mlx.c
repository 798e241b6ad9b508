// mlx's Linux wheel multiplies matrices with the reference BLAS, at a few GFLOP/s. Preloaded, this library answers
// instead and hands the call to the OpenBLAS of the scipy-openblas32 package. README.md says how it is built.
void scipy_cblas_sgemm(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float* a,
                       int row_a, const float* b, int row_b, float beta, float* c, int row_c);

void cblas_sgemm(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float* a, int row_a,
                 const float* b, int row_b, float beta, float* c, int row_c) {
  scipy_cblas_sgemm(order, transpose_a, transpose_b, m, n, k, alpha, a, row_a, b, row_b, beta, c, row_c);
}
