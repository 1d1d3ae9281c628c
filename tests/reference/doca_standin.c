/* A stand-in for libdoca_common and libdoca_dma: the functions that hyades.common.dma.doca calls,
 * over memcpy.  It checks what DOCA checks: states, ranges, counts of buffers and tasks; a call that
 * is wrong fails with DOCA's code, and what is left over at the end is told by standin_leaks().
 *
 * HYADES_STANDIN_DOCA has faults, comma separated: none (no device), unsupported, max=BYTES (of a
 * copy), tasks=N, fail=N (the N-th task ends with IO_FAILED), late=N (a task ends at the N-th
 * progress after its submission), again=N (the N-th submission says AGAIN).
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    OK = 0, NOT_SUPPORTED = 4, AGAIN = 5, INVALID = 6, NO_MEMORY = 7, NOT_FOUND = 16, IO_FAILED = 17,
    BAD_STATE = 18, IN_PROGRESS = 26,
};

static long option(const char *name, long otherwise)
{
    const char *text = getenv("HYADES_STANDIN_DOCA");
    size_t length = strlen(name);
    while (text && *text) {
        if (!strncmp(text, name, length) && (text[length] == '=' || text[length] == ',' || !text[length]))
            return text[length] == '=' ? atol(text + length + 1) : 1;
        text = strchr(text, ',');
        text = text ? text + 1 : NULL;
    }
    return otherwise;
}

struct dev { int open; };
struct mmap_ { struct dev *dev; char *at; size_t len; int started; uint32_t access; };
struct inventory { size_t count, used; int started; };
struct buf { struct inventory *from; struct mmap_ *map; char *data; size_t room, len; };
struct pe { struct dma *dma; };
typedef void (*callback)(void *task, uint64_t data, uint64_t context);
struct task {
    struct dma *dma; struct buf *src, *dst; uint64_t data; int status; long wait; int submitted;
    struct task *next;
};
struct dma {
    struct dev *dev; struct pe *pe; callback done, failed; uint32_t most, used; int running;
    struct task *first, *last;
};

#ifdef PART_COMMON
static struct dev only;
static int live;
static long submissions;
int standin_leaks(void) { return live; }
void standin_reset(void) { submissions = 0; live = 0; }

const char *doca_error_get_descr(int code)
{
    switch (code) {
    case OK: return "Success";
    case NOT_SUPPORTED: return "Operation not supported";
    case AGAIN: return "Resource temporarily unavailable";
    case INVALID: return "Invalid input";
    case NO_MEMORY: return "Memory allocation failure";
    case IO_FAILED: return "Input/Output Operation Failed";
    case BAD_STATE: return "Bad State";
    default: return "Unknown error";
    }
}

int doca_devinfo_create_list(struct dev ***list, uint32_t *count)
{
    *list = malloc(sizeof **list);
    **list = &only;
    *count = option("none", 0) ? 0 : 1;
    live++;
    return OK;
}
int doca_devinfo_destroy_list(struct dev **list) { free(list); live--; return OK; }
int doca_devinfo_get_pci_addr_str(const struct dev *dev, char *text)
{
    (void)dev;
    strcpy(text, "0000:03:00.0");
    return OK;
}
int doca_dev_open(struct dev *info, struct dev **dev) { info->open++; *dev = info; live++; return OK; }
int doca_dev_close(struct dev *dev)
{
    if (!dev->open) return BAD_STATE;
    dev->open--; live--;
    return OK;
}

int doca_mmap_create(struct mmap_ **map) { *map = calloc(1, sizeof **map); live++; return OK; }
int doca_mmap_destroy(struct mmap_ *map) { free(map); live--; return OK; }
int doca_mmap_add_dev(struct mmap_ *map, struct dev *dev) { map->dev = dev; return OK; }
int doca_mmap_set_permissions(struct mmap_ *map, uint32_t access) { map->access = access; return OK; }
int doca_mmap_set_memrange(struct mmap_ *map, void *at, size_t len)
{
    if (map->started || !at || !len) return INVALID;
    map->at = at; map->len = len;
    return OK;
}
int doca_mmap_start(struct mmap_ *map)
{
    if (!map->dev || !map->at) return BAD_STATE;
    map->started = 1;
    return OK;
}
int doca_mmap_stop(struct mmap_ *map) { map->started = 0; return OK; }

int doca_buf_inventory_create(size_t count, struct inventory **out)
{
    *out = calloc(1, sizeof **out);
    (*out)->count = count; live++;
    return OK;
}
int doca_buf_inventory_destroy(struct inventory *i)
{
    if (i->used) return BAD_STATE;
    free(i); live--;
    return OK;
}
int doca_buf_inventory_start(struct inventory *i) { i->started = 1; return OK; }
int doca_buf_inventory_stop(struct inventory *i) { i->started = 0; return OK; }
int doca_buf_inventory_buf_get_by_args(
    struct inventory *i, struct mmap_ *map, void *at, size_t len, void *data, size_t data_len,
    struct buf **out)
{
    if (!i->started || !map->started) return BAD_STATE;
    if ((char *)at < map->at || (char *)at + len > map->at + map->len || data_len > len) return INVALID;
    if (i->used == i->count) return NO_MEMORY;
    *out = calloc(1, sizeof **out);
    **out = (struct buf){i, map, data, len, data_len};
    i->used++; live++;
    return OK;
}
int doca_buf_dec_refcount(struct buf *buf, uint16_t *count)
{
    buf->from->used--; live--;
    free(buf);
    if (count) *count = 0;
    return OK;
}

int doca_pe_create(struct pe **pe) { *pe = calloc(1, sizeof **pe); live++; return OK; }
int doca_pe_destroy(struct pe *pe) { free(pe); live--; return OK; }
int doca_pe_connect_ctx(struct pe *pe, struct dma *dma) { pe->dma = dma; dma->pe = pe; return OK; }
uint8_t doca_pe_progress(struct pe *pe)
{
    struct dma *dma = pe->dma;
    struct task *task = dma ? dma->first : NULL;
    if (!task || --task->wait > 0) return 0;
    dma->first = task->next;
    if (!dma->first) dma->last = NULL;
    task->submitted = 0;
    if (!task->status) {
        memcpy(task->dst->data + task->dst->len, task->src->data, task->src->len);
        task->dst->len += task->src->len;
    }
    (task->status ? dma->failed : dma->done)(task, task->data, 0);
    return 1;
}
int doca_ctx_start(struct dma *dma)
{
    if (!dma->pe || !dma->done) return BAD_STATE;
    dma->running = 1;
    return OK;
}
int doca_ctx_stop(struct dma *dma)
{
    if (dma->first) return IN_PROGRESS;
    dma->running = 0;
    return OK;
}
int doca_task_submit(struct task *task)
{
    struct dma *dma = task->dma;
    submissions++;
    if (submissions == option("again", -1)) return AGAIN;
    if (!dma->running || task->submitted) return BAD_STATE;
    if (task->src->len > (size_t)option("max", 2 << 20)) return INVALID;
    if (task->dst->room < task->src->len) return INVALID;
    task->status = submissions == option("fail", -1) ? IO_FAILED : OK;
    task->wait = option("late", 1);
    task->submitted = 1;
    task->next = NULL;
    if (dma->last) dma->last->next = task; else dma->first = task;
    dma->last = task;
    return OK;
}
void doca_task_free(struct task *task) { task->dma->used--; free(task); }
int doca_task_get_status(const struct task *task) { return task->status; }
#endif

#ifdef PART_DMA
int doca_dma_create(struct dev *dev, struct dma **dma)
{
    if (!dev->open) return BAD_STATE;
    *dma = calloc(1, sizeof **dma);
    (*dma)->dev = dev;
    return OK;
}
int doca_dma_destroy(struct dma *dma)
{
    if (dma->running || dma->used) return BAD_STATE;
    dma->pe->dma = NULL;
    free(dma);
    return OK;
}
struct dma *doca_dma_as_ctx(struct dma *dma) { return dma; }
int doca_dma_cap_task_memcpy_is_supported(const struct dev *dev)
{
    (void)dev;
    return option("unsupported", 0) ? NOT_SUPPORTED : OK;
}
int doca_dma_cap_task_memcpy_get_max_buf_size(const struct dev *dev, uint64_t *most)
{
    (void)dev;
    *most = option("max", 2 << 20);
    return OK;
}
int doca_dma_cap_get_max_num_tasks(struct dma *dma, uint32_t *most)
{
    (void)dma;
    *most = option("tasks", 64);
    return OK;
}
int doca_dma_task_memcpy_set_conf(struct dma *dma, callback done, callback failed, uint32_t tasks)
{
    if (dma->running || tasks > option("tasks", 64)) return INVALID;
    dma->done = done; dma->failed = failed; dma->most = tasks;
    return OK;
}
int doca_dma_task_memcpy_alloc_init(
    struct dma *dma, const struct buf *src, struct buf *dst, uint64_t data, struct task **out)
{
    if (dma->used == dma->most) return NO_MEMORY;
    *out = calloc(1, sizeof **out);
    **out = (struct task){.dma = dma, .src = (struct buf *)src, .dst = dst, .data = data};
    dma->used++;
    return OK;
}
void *doca_dma_task_memcpy_as_task(struct task *task) { return task; }
#endif
