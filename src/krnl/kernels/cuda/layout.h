// How the operands of a product lie in memory, and the order in which its tiles are worked through.
#pragma once

// nn: a [m, k], b [k, n]; nt: b [n, k]; tn: a [k, m].
enum Layout { kNN, kNT, kTN };

constexpr int kTileGroup = 8;  // tiles along M that are worked through together: they share what was read of b
