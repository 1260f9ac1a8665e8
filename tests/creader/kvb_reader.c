/* A second reader of the packed block format, written from docs/wire-format.md alone. C99, no dependencies; the reader allocates nothing.
 *
 *   kvb_verdict           "ok", or the clause of the first broken rule of a container, in the order of section 7
 *   kvb_manifest_verdict  the same for a bare sealed manifest (section 7, B to F) under a key of 32 bytes
 *   kvb_decode            the rows of one side of a layer (its position in LAYERS) and head (of the payload), tokens ascending: fp32 (every
 *                         NaN as 0x7fc00000), or an opaque side's bytes. Returns how many rows, or -1. out == NULL only counts.
 *   kvb_dump              the manifest as text, a record a line (see put). Returns its length, or -1; writes at most `room` bytes.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NONE, RAW, FP8, CODEBOOK, AFFINE, INT8, OPAQUE };
enum { FULL = 1, SLIDING, LATENT, STATE };
enum { MODEL = 1, CONTENT, REQUEST, SHARD, PAYLOAD, GROUPS, CODECS, LAYERS, KNOWN };

static unsigned u16(const uint8_t *p) { return p[0] | (unsigned)p[1] << 8; }
static uint32_t u32(const uint8_t *p) { return u16(p) | (uint32_t)u16(p + 2) << 16; }
static uint64_t u64(const uint8_t *p) { return u32(p) | (uint64_t)u32(p + 4) << 32; }
static uint64_t up(uint64_t a, uint64_t b) { return (a + b - 1) / b * b; }
static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }
static uint64_t most(uint64_t a, uint64_t b) { return a > b ? a : b; }
static float as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static uint32_t as_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static int zero(const uint8_t *p, uint64_t n) {
    while (n && !*p) p++, n--;
    return !n;
}

/* ---- SHA-256 (FIPS 180-4), HMAC (RFC 2104), ChaCha20 (RFC 8439) ---- */
static const uint32_t SHA_K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
struct sha { uint32_t h[8]; uint64_t n; uint8_t buf[64]; };
static uint32_t ror(uint32_t x, int n) { return x >> n | x << (32 - n); }
static void sha_block(struct sha *s) {
    uint32_t w[64] = {0}, v[8];
    for (int i = 0; i < 64; i++) w[i / 4] = w[i / 4] << 8 | s->buf[i];
    for (int i = 16; i < 64; i++) {
        uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + (ror(a, 7) ^ ror(a, 18) ^ a >> 3) + w[i - 7] + (ror(b, 17) ^ ror(b, 19) ^ b >> 10);
    }
    memcpy(v, s->h, sizeof v);
    for (int i = 0; i < 64; i++) {
        uint32_t e = v[4], a = v[0];
        uint32_t t1 = v[7] + (ror(e, 6) ^ ror(e, 11) ^ ror(e, 25)) + ((e & v[5]) ^ (~e & v[6])) + SHA_K[i] + w[i];
        uint32_t t2 = (ror(a, 2) ^ ror(a, 13) ^ ror(a, 22)) + ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += t1, v[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++) s->h[i] += v[i];
}
#define SHA_START {{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19}, 0, {0}}
static void sha_add(struct sha *s, const uint8_t *p, uint64_t n) {
    while (n--)
        if ((s->buf[s->n % 64] = *p++, ++s->n % 64) == 0) sha_block(s);
}
static void sha_end(struct sha *s, uint8_t out[32]) {
    uint64_t bits = s->n * 8;
    for (sha_add(s, (uint8_t[]){0x80}, 1); s->n % 64 != 56;) sha_add(s, (uint8_t[]){0}, 1);
    for (int i = 56; i >= 0; i -= 8) sha_add(s, (uint8_t[]){(uint8_t)(bits >> i)}, 1);
    for (int i = 0; i < 32; i++) out[i] = (uint8_t)(s->h[i / 4] >> (24 - 8 * (i % 4)));
}
static void hmac(const uint8_t key[32], const uint8_t *p, uint64_t n, uint8_t out[32]) {
    uint8_t pad[64];
    for (int outer = 0; outer < 2; outer++) {
        struct sha s = SHA_START;
        for (int i = 0; i < 64; i++) pad[i] = (uint8_t)((i < 32 ? key[i] : 0) ^ (outer ? 0x5c : 0x36));
        sha_add(&s, pad, 64);
        sha_add(&s, outer ? out : p, outer ? 32 : n);
        sha_end(&s, out);
    }
}
#define QUARTER(a, b, c, d) \
    x[a] += x[b], x[d] = ror(x[d] ^ x[a], 16), x[c] += x[d], x[b] = ror(x[b] ^ x[c], 20), \
    x[a] += x[b], x[d] = ror(x[d] ^ x[a], 24), x[c] += x[d], x[b] = ror(x[b] ^ x[c], 25)
/* Eight u64 of the key stream, those of one block counter. nonce: 12 bytes. */
static void chacha(const uint8_t key[32], const uint8_t nonce[12], uint32_t counter, uint64_t out[8]) {
    uint32_t s[16] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574}, x[16];
    for (int i = 0; i < 8; i++) s[4 + i] = u32(key + 4 * i);
    s[12] = counter;
    for (int i = 0; i < 3; i++) s[13 + i] = u32(nonce + 4 * i);
    memcpy(x, s, sizeof x);
    for (int i = 0; i < 10; i++) {
        QUARTER(0, 4, 8, 12); QUARTER(1, 5, 9, 13); QUARTER(2, 6, 10, 14); QUARTER(3, 7, 11, 15);
        QUARTER(0, 5, 10, 15); QUARTER(1, 6, 11, 12); QUARTER(2, 7, 8, 13); QUARTER(3, 4, 9, 14);
    }
    for (int i = 0; i < 16; i++) x[i] += s[i];
    for (int i = 0; i < 8; i++) out[i] = x[2 * i] | (uint64_t)x[2 * i + 1] << 32;
}

/* ---- Manifest (sections 3 and 7) ---- */
struct manifest { const uint8_t *data, *key, *body, *at[KNOWN]; uint64_t total, chunk, stated, size[KNOWN]; unsigned minor, count[KNOWN]; };
struct group { unsigned kind, dim, heads, head_first, head_count; uint32_t window; uint64_t first, end; };
struct coding { unsigned kind, bits, element, rotation; uint32_t row_bytes; const uint8_t *digest; };
struct layer { unsigned index, group, codec, source; float scale[2]; };

static struct group group_of(const struct manifest *m, unsigned i) {
    const uint8_t *p = m->at[GROUPS] + 8 + 32 * i;
    return (struct group){p[0], u16(p + 2), u16(p + 4), u16(p + 6), u16(p + 8), u32(p + 12), u64(p + 16), u64(p + 24)};
}
static struct coding coding_of(const struct manifest *m, unsigned codec, int side) {
    const uint8_t *p = m->at[CODECS] + 8 + 80 * codec + 40 * side;
    return (struct coding){p[0], p[1], p[2], p[3], u32(p + 4), p + 8};
}
static struct layer layer_of(const struct manifest *m, unsigned i) {
    const uint8_t *p = m->at[LAYERS] + 8 + 16 * i;
    return (struct layer){u16(p), u16(p + 2), u16(p + 4), u16(p + 6), {as_float(u32(p + 8)), as_float(u32(p + 12))}};
}
static int utf8(const uint8_t *p, uint64_t n) {
    static const uint32_t FIRST[] = {0, 0x80, 0x800, 0x10000};
    for (unsigned more; n; p += 1 + more, n -= 1 + more) {
        more = p[0] < 0x80 ? 0 : (p[0] & 0xe0) == 0xc0 ? 1 : (p[0] & 0xf0) == 0xe0 ? 2 : (p[0] & 0xf8) == 0xf0 ? 3 : 4;
        if (more == 4 || more >= n) return 0;
        uint32_t code = more ? p[0] & (0x3fu >> more) : p[0];
        for (unsigned i = 1; i <= more; code = code << 6 | (p[i++] & 0x3f))
            if ((p[i] & 0xc0) != 0x80) return 0;
        if (code < FIRST[more] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return 0;
    }
    return 1;
}
static const char *split(struct manifest *m, unsigned count) {
    const uint8_t *p = m->data + 24, *stop = m->data + m->total - 32;
    for (int previous = -1; count--;) {
        if (stop - p < 8) return "truncated";
        int kind = (int)u16(p);
        uint64_t size = u32(p + 4), padded = up(size, 8);
        if ((uint64_t)(stop - p - 8) < padded) return "truncated";
        if (u16(p + 2) || !zero(p + 8 + size, padded - size)) return "reserved_not_zero";
        if (kind <= previous) return "section_order";
        if (kind >= MODEL && kind < KNOWN) m->at[kind] = p + 8, m->size[kind] = size;
        else if (kind < 0x8000 || m->minor <= 1) return "unknown_section";
        previous = kind, p += 8 + padded;
    }
    if (p != stop) return "trailing_bytes";
    for (int kind = MODEL; kind < KNOWN; kind++)
        if (!m->at[kind]) return "missing_section";
    return NULL;
}
static const char *table(struct manifest *m, int kind, unsigned record, unsigned limit) {
    const uint8_t *p = m->at[kind];
    if (m->size[kind] < 8) return "section_size";
    if (!zero(p + 2, 6)) return "reserved_not_zero";
    if ((m->count[kind] = u16(p)) > limit) return "too_large";
    return m->size[kind] == 8 + (uint64_t)record * m->count[kind] ? NULL : "section_size";
}
static int coding_ok(struct coding c) {
    static const uint8_t ALLOWED[][4] = {{NONE, 0, 0, 0}, {RAW, 16, 1, 0}, {RAW, 16, 2, 0}, {RAW, 32, 3, 0}, {FP8, 8, 4, 0},
        {CODEBOOK, 3, 0, 1}, {CODEBOOK, 4, 0, 1}, {AFFINE, 3, 0, 0}, {AFFINE, 4, 0, 0}, {INT8, 8, 0, 0}, {OPAQUE, 0, 0, 0}};
    if (c.kind == OPAQUE ? c.row_bytes < 1 || c.row_bytes > 1 << 20 : c.row_bytes != 0) return 0;
    if (zero(c.digest, 32) == (c.kind == CODEBOOK || c.kind == OPAQUE)) return 0;
    for (unsigned i = 0; i < sizeof ALLOWED / 4; i++)
        if (c.kind == ALLOWED[i][0] && c.bits == ALLOWED[i][1] && c.element == ALLOWED[i][2] && c.rotation == ALLOWED[i][3]) return 1;
    return 0;
}
static const char *structure(struct manifest *m) {
    const char *bad; const uint8_t *p = m->at[REQUEST];
    if (m->size[MODEL] != 32 || m->size[REQUEST] < 16 || m->size[REQUEST] != 16u + u16(p + 12)) return "section_size";
    if (u16(p + 14)) return "reserved_not_zero";
    if (!utf8(p + 16, u16(p + 12))) return "bad_text";
    if (m->size[PAYLOAD] != 16) return "section_size";
    if (u32(m->at[PAYLOAD] + 4)) return "reserved_not_zero";
    m->chunk = u32(m->at[PAYLOAD]), m->stated = u64(m->at[PAYLOAD] + 8);
    if ((bad = table(m, CONTENT, 40, 16))) return bad;
    for (p = m->at[CONTENT] + 8; p < m->at[CONTENT] + m->size[CONTENT]; p += 40) {
        if (!zero(p + 2, 6)) return "reserved_not_zero";
        if (u16(p) < 1 || u16(p) > 5) return "bad_content";
    }
    if ((bad = table(m, GROUPS, 32, 64))) return bad;
    for (p = m->at[GROUPS] + 8; p < m->at[GROUPS] + m->size[GROUPS]; p += 32) {
        if (p[1] || u16(p + 10)) return "reserved_not_zero";
        if (p[0] < FULL || p[0] > STATE) return "bad_group";
        if (u16(p + 8) == 0) return "bad_shard";
    }
    if ((bad = table(m, CODECS, 80, 64))) return bad;
    for (unsigned i = 0; i < m->count[CODECS]; i++)
        if (!coding_ok(coding_of(m, i, 0)) || !coding_ok(coding_of(m, i, 1)) || coding_of(m, i, 0).kind == NONE) return "bad_coding";
    if ((bad = table(m, LAYERS, 16, 1024))) return bad;
    for (unsigned i = 0; i < m->count[LAYERS]; i++)
        if (layer_of(m, i).source > 4) return "bad_coding";
    return m->size[SHARD] == 8 ? NULL : "section_size";
}
static const char *check_group(struct group g) {
    if (g.heads < 1 || g.heads > 1024 || g.dim < 16 || g.dim > 1024 || g.dim % 16) return "bad_group";
    if (g.head_count > 1024 || g.head_first + g.head_count > g.heads) return "bad_shard";
    if (g.end < 1 || g.end > 1 << 24 || g.first >= g.end) return "bad_token_range";
    if ((g.window > 0) != (g.kind == SLIDING) || g.window > 1 << 24) return "bad_group";
    return g.kind == STATE && (g.first % 16 || g.end != g.first + 16) ? "bad_token_range" : NULL;
}
static const char *check_layer(const struct manifest *m, struct layer x, int previous) {
    if ((int)x.index <= previous) return "layer_order";
    if (x.group >= m->count[GROUPS] || x.codec >= m->count[CODECS]) return "bad_reference";
    struct group g = group_of(m, x.group);
    struct coding c[2] = {coding_of(m, x.codec, 0), coding_of(m, x.codec, 1)};
    if ((c[0].rotation || c[1].rotation) && (g.dim & (g.dim - 1))) return "bad_head_dim";
    if (g.kind != STATE && (c[1].kind == NONE) != (g.kind == LATENT)) return "bad_coding";
    if (g.kind == STATE && (c[0].kind != OPAQUE || (c[1].kind != OPAQUE && c[1].kind != NONE))) return "bad_coding";
    for (int side = 0; side < 2; side++)
        if (!(x.scale[side] > 0) || isinf(x.scale[side]) || (c[side].kind != FP8 && x.scale[side] != 1)) return "bad_scale";
    return NULL;
}
/* One layer's part of the tokens [lo, hi) (section 5.3). blocks is 0 where it has none. */
struct span { uint64_t lo, hi, blocks, block_bytes, run, code[2], scalar[2]; unsigned heads, dim; struct coding side[2]; float scale[2]; };

static struct span span_of(const struct manifest *m, unsigned layer, uint64_t lo, uint64_t hi) {
    struct layer x = layer_of(m, layer);
    struct group g = group_of(m, x.group);
    struct span s = {.lo = most(lo, g.first), .hi = least(hi, g.end), .heads = g.head_count, .dim = g.dim};
    for (int i = 0; i < 2; i++) {
        struct coding c = s.side[i] = coding_of(m, x.codec, i);
        s.scale[i] = x.scale[i];
        s.code[i] = c.kind == OPAQUE ? c.row_bytes : (uint64_t)g.dim * c.bits / 8;
        s.scalar[i] = c.kind == CODEBOOK ? 2 : c.kind == AFFINE || c.kind == INT8 ? 4 : 0;
        s.block_bytes += 16 * (s.code[i] + s.scalar[i]);
    }
    s.blocks = s.lo < s.hi ? up(s.hi, 16) / 16 - s.lo / 16 : 0;
    s.run = s.blocks * s.block_bytes + up(8 * s.blocks, 16);
    return s;
}
/* Bytes of a layer over all chunks: its first chunk, its last one, and the whole ones between. */
static uint64_t layer_bytes(const struct manifest *m, unsigned layer) {
    struct group g = group_of(m, layer_of(m, layer).group);
    uint64_t c = m->chunk, a = g.first / c, z = (g.end - 1) / c, runs = span_of(m, layer, a * c, (a + 1) * c).run;
    if (a < z) runs += span_of(m, layer, z * c, (z + 1) * c).run;
    if (a + 1 < z) runs += (z - a - 1) * span_of(m, layer, (a + 1) * c, (a + 2) * c).run;
    return runs * g.head_count;
}
static const char *fields(const struct manifest *m) {
    const char *bad;
    const uint8_t *p = m->at[CONTENT] + 8;
    if (m->count[CONTENT] == 0 || u16(p) != 1) return "bad_content";
    for (unsigned i = 1; i < m->count[CONTENT]; i++)
        if (u16(p + 40 * i) <= u16(p + 40 * i - 40)) return "bad_content";
    if (m->size[REQUEST] < 17 || m->size[REQUEST] > 16 + 256) return "bad_text";
    for (p = m->at[SHARD]; p < m->at[SHARD] + 8; p += 4)
        if (u16(p + 2) < 1 || u16(p + 2) > 4096 || u16(p) >= u16(p + 2)) return "bad_shard";
    if (m->chunk < 16 || m->chunk > 65536 || m->chunk % 16) return "bad_chunking";
    if (m->count[GROUPS] == 0) return "bad_group";
    for (unsigned i = 0; i < m->count[GROUPS]; i++)
        if ((bad = check_group(group_of(m, i)))) return bad;
    if (m->count[CODECS] == 0 || m->count[LAYERS] == 0) return m->count[CODECS] ? "layer_order" : "bad_coding";
    uint64_t groups = 0, codecs = 0, blocks = 0, bytes = 0, all = ~(uint64_t)0;
    for (unsigned i = 0; i < m->count[LAYERS]; i++) {
        struct layer x = layer_of(m, i);
        if ((bad = check_layer(m, x, i ? (int)layer_of(m, i - 1).index : -1))) return bad;
        groups |= (uint64_t)1 << x.group, codecs |= (uint64_t)1 << x.codec;
        blocks += span_of(m, i, 0, 1 << 24).blocks * group_of(m, x.group).head_count;
    }
    if (groups != all >> (64 - m->count[GROUPS]) || codecs != all >> (64 - m->count[CODECS])) return "bad_reference";
    if (blocks > (uint64_t)1 << 34) return "too_large";
    for (unsigned i = 0; i < m->count[LAYERS]; i++) bytes += layer_bytes(m, i);
    return m->stated == bytes ? NULL : "payload_size";
}
static const char *open_manifest(struct manifest *m, const uint8_t *data, uint64_t n, const uint8_t *key) {
    const char *bad; uint8_t seal[32];
    if (n < 24) return "truncated";
    if (memcmp(data, "KVBRIDGE", 8)) return "bad_magic";
    if (u16(data + 8) != 0) return "unsupported_version";
    if (!zero(data + 18, 6)) return "reserved_not_zero";
    *m = (struct manifest){.data = data, .key = key, .minor = u16(data + 10), .total = u32(data + 12)};
    if (m->total > 1 << 20 || u16(data + 16) > 64) return "too_large";
    if (m->total < 56 || n < m->total) return "truncated";
    if (n > m->total) return "trailing_bytes";
    hmac(key, data, m->total - 32, seal);
    if (memcmp(seal, data + m->total - 32, 32)) return "bad_seal";
    return (bad = split(m, u16(data + 16))) || (bad = structure(m)) ? bad : fields(m);
}
static const char *open_container(struct manifest *m, const uint8_t *data, uint64_t n) {
    if (n < 64) return "truncated";
    if (memcmp(data, "KVBFILE\n", 8)) return "bad_magic";
    if (!zero(data + 12, 4) || !zero(data + 56, 8)) return "reserved_not_zero";
    uint64_t size = u32(data + 8), payload = u64(data + 48), begin = 64 + up(size, 64);
    if (size > 1 << 20) return "too_large";
    if (n < begin || n - begin < payload) return "truncated";
    if (n - begin > payload) return "trailing_bytes";
    if (!zero(data + 64 + size, begin - 64 - size)) return "reserved_not_zero";
    const char *bad = open_manifest(m, data + 64, size, data + 16);
    m->body = data + begin;
    return bad ? bad : m->stated == payload ? NULL : "payload_size";
}

/* ---- Codecs (section 4) ---- */
static const uint32_t BOOKS[4][2][8] = {
    {{0x3cfadcfb, 0x3dc171fc, 0x3e2bed53, 0x3e899f54},
     {0x3c83828a, 0x3d46b9ff, 0x3da82948, 0x3df1444a, 0x3e20cd0c, 0x3e4f16c0, 0x3e846170, 0x3eaec76e}},
    {{0x3cb16317, 0x3d88c955, 0x3df3243d, 0x3e42a09f},
     {0x3c39fbae, 0x3d0c8559, 0x3d6dd0e1, 0x3daa99f2, 0x3de3682b, 0x3e126f17, 0x3e3b36e7, 0x3e772cc4}},
    {{0x3c7adcfb, 0x3d4171fc, 0x3dabed53, 0x3e099f54},
     {0x3c03828a, 0x3cc6b9ff, 0x3d282948, 0x3d71444a, 0x3da0cd0c, 0x3dcf16c0, 0x3e046170, 0x3e2ec76e}},
    {{0x3c316317, 0x3d08c955, 0x3d73243d, 0x3dc2a09f},
     {0x3bb9fbae, 0x3c8c8559, 0x3cedd0e1, 0x3d2a99f2, 0x3d63682b, 0x3d926f17, 0x3dbb36e7, 0x3df72cc4}},
};

/* The entries of a book, ascending; 0 where there is none. */
static int book(unsigned dim, unsigned bits, float out[16]) {
    unsigned half = 1u << (bits - 1), row = dim == 64 ? 0 : dim == 128 ? 1 : dim == 256 ? 2 : 3;
    for (unsigned i = 0; i < half; i++) out[half - 1 - i] = -(out[half + i] = as_float(BOOKS[row][bits - 3][i]));
    return dim == 64u << row;
}
static const char *check_books(const struct manifest *m) {
    for (unsigned i = 0; i < 2 * m->count[LAYERS]; i++) {
        struct layer x = layer_of(m, i / 2);
        struct coding c = coding_of(m, x.codec, i % 2);
        struct sha s = SHA_START;
        float entries[16]; uint8_t digest[32];
        if (c.kind != CODEBOOK) continue;
        if (!book(group_of(m, x.group).dim, c.bits, entries)) return "bad_codebook";
        for (unsigned j = 0; j < 4u << c.bits; j++) sha_add(&s, (uint8_t[]){(uint8_t)(as_bits(entries[j / 4]) >> 8 * (j % 4))}, 1);
        sha_end(&s, digest);
        if (memcmp(digest, c.digest, 32)) return "bad_codebook";
    }
    return NULL;
}
static float half(uint32_t h) {
    uint32_t sign = (h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
    if (exponent == 0) return as_float(as_bits((float)mantissa * 0x1p-24f) | sign);
    return as_float(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13);
}
/* The bits of an fp16 whose exponent has another bias: eight less. */
static float e4m3(uint32_t code) {
    return (code & 0x7f) == 0x7f ? as_float(0x7fc00000) : half((code & 0x80) << 8 | (code & 0x7f) << 7) * 256.0f;
}
static unsigned code_at(const uint8_t *p, unsigned bits, unsigned j) {
    unsigned at = j * bits, two = p[at / 8] | (at % 8 + bits > 8 ? (unsigned)p[at / 8 + 1] << 8 : 0);
    return two >> at % 8 & ((1u << bits) - 1);
}
static void codebook_row(const uint8_t *codes, const uint8_t *norm, unsigned bits, unsigned dim, float *x) {
    float entries[16], s[512];
    book(dim, bits, entries);
    for (unsigned j = 0; j < dim; j++) x[j] = entries[code_at(codes, bits, j)], s[j] = x[j] * x[j];
    for (unsigned n = dim / 2; n; n /= 2)
        for (unsigned j = 0; j < n; j++) s[j] = s[j] + s[j + n];
    float q = 1.0f / sqrtf(s[0] + 1e-16f), f = half(u16(norm)) * q;
    f = f * (float)(1.0 / sqrt((double)dim));
    for (unsigned h = 1; h < dim; h *= 2)
        for (unsigned j = 0; j < dim; j++)
            if (!(j & h)) { float a = x[j], b = x[j + h]; x[j] = a + b, x[j + h] = a - b; }
    for (unsigned j = 0; j < dim; j++) x[j] = x[j] * f;
}
static void decode_row(struct coding c, unsigned dim, float scale, const uint8_t *codes, const uint8_t *scalars, float *x) {
    if (c.kind == CODEBOOK) codebook_row(codes, scalars, c.bits, dim, x);
    for (unsigned j = 0; j < dim; j++) {
        if (c.kind == RAW && c.element == 1) x[j] = as_float(u16(codes + 2 * j) << 16);
        if (c.kind == RAW && c.element == 2) x[j] = half(u16(codes + 2 * j));
        if (c.kind == RAW && c.element == 3) x[j] = as_float(u32(codes + 4 * j));
        if (c.kind == FP8) x[j] = scale == 1 ? e4m3(codes[j]) : e4m3(codes[j]) * scale;
        if (c.kind == INT8) x[j] = (float)(codes[j] < 128 ? codes[j] : codes[j] - 256) * as_float(u32(scalars));
        if (c.kind == AFFINE) x[j] = (float)code_at(codes, c.bits, j) * half(u16(scalars)), x[j] = x[j] + half(u16(scalars + 2));
        if (isnan(x[j])) x[j] = as_float(0x7fc00000);
    }
}

/* ---- Payload (sections 5 and 6) ---- */
struct cursor { uint64_t chunk, offset, ordinal; unsigned layer; struct span span; };

/* The next span with blocks, in payload order: 1, and c->offset and c->ordinal are its own; 0 at the end. Starts from zeros. */
static int next_span(const struct manifest *m, struct cursor *c) {
    c->offset += c->span.heads * c->span.run, c->ordinal += c->span.heads * c->span.blocks;
    for (;; c->layer = 0) {
        while (c->layer < m->count[LAYERS]) {
            c->span = span_of(m, c->layer++, c->chunk * m->chunk, (c->chunk + 1) * m->chunk);
            if (c->span.blocks) return 1;
        }
        uint64_t stop = (c->chunk + 1) * m->chunk, next = UINT64_MAX;
        for (unsigned i = 0; i < m->count[GROUPS]; i++)
            if (group_of(m, i).end > stop) next = least(next, most(group_of(m, i).first, stop));
        if (next == UINT64_MAX) return 0;
        c->chunk = next / m->chunk;
    }
}
/* A block's valid range: first + 256 * end. */
static uint64_t valid(const struct span *s, uint64_t block) {
    uint64_t start = (s->lo / 16 + block) * 16;
    return (s->lo > start ? s->lo - start : 0) + 256 * least(s->hi - start, 16);
}
static const char *check_tags(const struct manifest *m, const struct span *s, const uint8_t *run, uint64_t ordinal) {
    uint64_t sums[65536 / 16] = {0}, stream[8];
    const uint8_t *nonce = m->at[REQUEST], *tags = run + s->blocks * s->block_bytes;
    for (uint64_t key = 0; key <= s->block_bytes / 4; key += 8) {
        chacha(m->key, nonce, (uint32_t)((1u << 31) + key / 8), stream);
        for (uint64_t i = 0; i < s->blocks; i++)
            for (uint64_t j = key; j < key + 8 && j <= s->block_bytes / 4; j++)
                sums[i] += stream[j - key] * (j ? u32(run + i * s->block_bytes + 4 * (j - 1)) : valid(s, i));
    }
    for (uint64_t i = 0; i < s->blocks; i++) {
        if (i == 0 || (ordinal + i) % 8 == 0) chacha(m->key, nonce, (uint32_t)((ordinal + i) / 8), stream);
        if (sums[i] + stream[(ordinal + i) % 8] != u64(tags + 8 * i)) return "bad_tag";
    }
    return NULL;
}
static int rows_clean(const struct span *s, const uint8_t *plane) {
    for (uint64_t i = 0; i < s->blocks; i++)
        for (int p = 0; p < 4; p++) {
            uint64_t row = p < 2 ? s->code[p] : s->scalar[p - 2], first = valid(s, i) & 255, end = valid(s, i) >> 8;
            if (!zero(plane, first * row) || !zero(plane + end * row, (16 - end) * row)) return 0;
            plane += 16 * row;
        }
    return 1;
}
static const char *check_payload(const struct manifest *m) {
    const char *bad;
    for (struct cursor c = {0}; next_span(m, &c);) {
        const struct span *s = &c.span;
        const uint8_t *p = m->body + c.offset;
        for (unsigned h = 0; h < s->heads; h++)
            if ((bad = check_tags(m, s, p + h * s->run, c.ordinal + h * s->blocks))) return bad;
        for (unsigned h = 0; h < s->heads; h++)
            if ((s->blocks % 2 && !zero(p + (h + 1) * s->run - 8, 8)) || !rows_clean(s, p + h * s->run)) return "dirty_padding";
    }
    return NULL;
}
const char *kvb_verdict(const uint8_t *data, size_t n) {
    struct manifest m = {0};
    const char *bad;
    return (bad = open_container(&m, data, n)) || (bad = check_books(&m)) || (bad = check_payload(&m)) ? bad : "ok";
}
const char *kvb_manifest_verdict(const uint8_t *data, size_t n, const uint8_t *key) {
    struct manifest m;
    const char *bad = open_manifest(&m, data, n, key);
    return bad ? bad : "ok";
}
long kvb_decode(const uint8_t *data, size_t n, unsigned layer, unsigned head, int side, void *out) {
    struct manifest m = {0};
    long rows = 0;
    if (open_container(&m, data, n) || check_books(&m) || layer >= m.count[LAYERS] || side < 0 || side > 1) return -1;
    for (struct cursor c = {0}; next_span(&m, &c);) {
        const struct span *s = &c.span;
        if (c.layer - 1 != layer) continue;
        if (head >= s->heads || s->side[side].kind == NONE) return -1;
        for (uint64_t token = s->lo; token < s->hi; token++, rows++) {
            const uint8_t *block = m.body + c.offset + head * s->run + (token / 16 - s->lo / 16) * s->block_bytes;
            const uint8_t *codes = block + side * 16 * s->code[0] + token % 16 * s->code[side];
            const uint8_t *scalars = block + 16 * (s->code[0] + s->code[1] + side * s->scalar[0]) + token % 16 * s->scalar[side];
            if (out && s->side[side].kind == OPAQUE) memcpy((uint8_t *)out + rows * s->code[side], codes, s->code[side]);
            else if (out) decode_row(s->side[side], s->dim, s->scale[side], codes, scalars, (float *)out + rows * s->dim);
        }
    }
    return rows;
}

/* ---- Text ---- */
/* A line: fields of 1, 2, 4 or 8 bytes from p on, as numbers; -n: n bytes left out; 1000 + n: n bytes as hexadecimal; 0: the end. */
static long put(char *out, size_t room, long at, const char *name, const uint8_t *p, const int *widths) {
#define PUT(...) at += snprintf((size_t)at < room ? out + at : NULL, (size_t)at < room ? room - (size_t)at : 0, __VA_ARGS__)
    PUT("%s", name);
    for (int w; (w = *widths++); p += abs(w) % 1000) {
        if (w > 0) PUT(" ");
        for (int i = 1000; i < w; i++) PUT("%02x", p[i - 1000]);
        if (w > 0 && w <= 8) PUT("%llu", (unsigned long long)(w == 1 ? p[0] : w == 2 ? u16(p) : w == 4 ? u32(p) : u64(p)));
    }
    return PUT("\n");
}
long kvb_dump(const uint8_t *data, size_t n, char *out, size_t room) {
    static const struct { int section; unsigned record; const char *name; int widths[12]; } LINES[] = {
        {MODEL, 0, "model", {1032}}, {CONTENT, 40, "content", {2, -6, 1032}}, {REQUEST, 0, "request", {8, 4}},
        {SHARD, 0, "shard", {2, 2, 2, 2}}, {PAYLOAD, 0, "payload", {4, -4, 8}}, {GROUPS, 32, "group", {1, -1, 2, 2, 2, 2, -2, 4, 8, 8}},
        {CODECS, 40, "coding", {1, 1, 1, 1, 4, 1032}}, {LAYERS, 16, "layer", {2, 2, 2, 2, 1004, 1004}}};
    struct manifest m = {0};
    if (open_container(&m, data, n)) return -1;
    long at = put(out, room, 0, "version", m.data + 8, (const int[]){2, 2, 0});
    at = put(out, room, at, "id", m.at[REQUEST] + 16, (const int[]){1000 + (int)u16(m.at[REQUEST] + 12), 0});
    for (int i = 0; i < 8; i++)
        for (uint64_t o = LINES[i].record ? 8 : 0; o < m.size[LINES[i].section]; o += LINES[i].record ? LINES[i].record : 1 << 20)
            at = put(out, room, at, LINES[i].name, m.at[LINES[i].section] + o, LINES[i].widths);
    return at;
}

#ifdef KVB_MAIN
/* kvbread FILE...: for each the verdict and, where the manifest is good, its text and how many rows each side has. 1: one was refused. */
int main(int argc, char **argv) {
    int refused = 0;
    for (int i = 1; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        long size = file && !fseek(file, 0, SEEK_END) ? ftell(file) : -1, rows;
        uint8_t *data = size < 0 ? NULL : malloc((size_t)size + !size);
        if (!data || fseek(file, 0, SEEK_SET) || fread(data, 1, (size_t)size, file) != (size_t)size) return perror(argv[i]), 2;
        struct manifest m = {0};
        const char *verdict = kvb_verdict(data, (size_t)size), *bad = open_container(&m, data, (size_t)size);
        long text = kvb_dump(data, (size_t)size, NULL, 0) + 1;
        char *out = malloc((size_t)text + 1);
        if (out && !bad) kvb_dump(data, (size_t)size, out, (size_t)text), fputs(out, stdout);
        for (unsigned at = 0, layer = 0; !bad && layer < m.count[LAYERS]; layer = ++at / 2048) {
            struct span s = span_of(&m, layer, 0, 1 << 24);
            if (at / 2 % 1024 >= s.heads || (rows = kvb_decode(data, (size_t)size, layer, at / 2 % 1024, at % 2, NULL)) < 0) continue;
            if (!(out = realloc(out, (size_t)rows * most(s.code[at % 2], 4 * s.dim)))) return 2;
            printf("rows %u %u %u %ld\n", layer, at / 2 % 1024, at % 2, kvb_decode(data, (size_t)size, layer, at / 2 % 1024, at % 2, out));
        }
        printf("verdict %s\n", verdict);
        refused |= strcmp(verdict, "ok") != 0;
        free(out), free(data), fclose(file);
    }
    return refused;
}
#endif
