/* Which group each lane of a block belongs to. A block is VB packed bytes; a lane, a part of it, never straddles groups. */

struct T(group_map) {
    int64_t blocks;
    int32_t *first;     /* [blocks] group of the first lane */
    int32_t *count;     /* [blocks] groups that the block touches */
    int32_t *map;       /* [blocks][LANES] group of each lane, from `first` */
};

static inline int64_t T(group_map_bytes)(int64_t blocks) { return blocks * (8 + 4 * LANES) + 192; }

/* `codes`: codes in a lane. Lies in `memory`, group_map_bytes(blocks) long. */
static struct T(group_map) T(map_groups)(const struct lowbit_problem *p, int64_t blocks, int64_t codes, char *memory) {
    struct T(group_map) g = {blocks, NULL, NULL, NULL};
    g.map = (int32_t *)memory;
    g.first = g.map + blocks * LANES;
    g.count = g.first + blocks;
    int64_t lanes_a_group = p->group / codes, group = 0, left = lanes_a_group;
    for (int64_t b = 0; b < blocks; b++) {
        int64_t first = min64(group, p->groups - 1), last = first;
        for (int l = 0; l < LANES; l++) {
            last = min64(group, p->groups - 1);
            g.map[b * LANES + l] = (int32_t)(last - first);
            if (p->grouped && --left == 0) { group++; left = lanes_a_group; }
        }
        g.first[b] = (int32_t)first;
        g.count[b] = (int32_t)(last - first + 1);
    }
    return g;
}
