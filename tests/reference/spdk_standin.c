/* A small stand-in for SPDK's NVMe driver over a file, for tests only.
 *
 * Build it twice into one folder: -DPART_ENV as libspdk_env_dpdk.so.N, -DPART_NVME as
 * libspdk_nvme.so.N.  The device is the file $STANDIN_FOLDER/<subnqn>, or the PCIe address.
 * Sizes of the options structures are set by -DENV_SIZE, -DCTRLR_SIZE and -DQPAIR_SIZE: whatever
 * the caller claims, all of that is written, as a library of another release would.
 *
 * $STANDIN holds faults as name=value, separated by commas:
 *   sector=N     bytes of a sector (4096)            maxio=N     bytes of a transfer (1 MiB)
 *   enomem=N     every Nth submit gives -ENOMEM      hold=N      complete N polls later, shuffled
 *   break=N      the Nth command breaks its queue: -ENXIO, what is under way is aborted
 *   breaks=N     how often that happens (1)          fail=1      and the controller fails with it
 *   orphan=1     what is under way then is not aborted; its callbacks come late, after the queue
 *                has been freed
 *   mute=N       commands after the Nth are never completed, on the first connection
 *   refuse=N     connects that fail after the first connection; -1: all
 *   media=A:B    reads of sectors A to B-1 fail with a media error, writes to them with a fault
 *   full=A       writes from sector A on fail with "capacity exceeded"
 *   path=A:N     the first N reads of sector A fail with "asymmetric access transition"
 *   bad=A:S      reads of sector A fail with the status S (type << 8 | code | 1 << 14 for DNR)
 *   noflush=1    no volatile cache                   meta=N      bytes of metadata
 *   other=1      another identity after reconnecting shrink=1    half the size after reconnecting
 *   epoch=N      1: a Hyades target with its cache intact, 2: with a new one on each connection
 *   crash=N      the Nth command kills the process   stop=N      ... stops it (SIGSTOP)
 *   rdma=0       no RDMA transport                   namespaces=N active ones (1)
 * $STANDIN_LOG is a file that takes one line a call worth telling.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef ENV_SIZE
#define ENV_SIZE 128
#endif
#ifndef CTRLR_SIZE
#define CTRLR_SIZE 856
#endif
#ifndef QPAIR_SIZE
#define QPAIR_SIZE 80
#endif

static __attribute__((unused)) void note(const char *format, ...)
{
	const char *path = getenv("STANDIN_LOG");
	char line[1024];
	va_list args;
	int fd, length;

	va_start(args, format);
	length = vsnprintf(line, sizeof(line) - 1, format, args);
	va_end(args);
	line[length] = '\n';
	if (path == NULL || (fd = open(path, O_WRONLY | O_CREAT | O_APPEND, 0644)) < 0) {
		return;
	}
	if (write(fd, line, length + 1) < 0) {
		abort();
	}
	close(fd);
}

static __attribute__((unused)) const char *fault_text(const char *name)
{
	const char *at = getenv("STANDIN");
	size_t length = strlen(name);

	while (at != NULL && *at != 0) {
		if (strncmp(at, name, length) == 0 && at[length] == '=') {
			return at + length + 1;
		}
		at = strchr(at, ',');
		at = at ? at + 1 : NULL;
	}
	return NULL;
}

static __attribute__((unused)) long fault(const char *name, long otherwise)
{
	const char *text = fault_text(name);
	return text ? strtol(text, NULL, 0) : otherwise;
}

/* The second number of A:B. */
static __attribute__((unused)) long fault_end(const char *name, long otherwise)
{
	const char *text = fault_text(name);
	char *end;

	if (text == NULL) {
		return otherwise;
	}
	strtol(text, &end, 0);
	return *end == ':' ? strtol(end + 1, NULL, 0) : otherwise;
}

#ifdef PART_ENV

struct env_opts {
	const char *name, *core_mask, *lcore_map;
	int shm_id, mem_channel, main_core, mem_size;
	bool no_pci, single, unlink, no_huge;
	uint32_t reserved;
	size_t num_pci_addr;
	const char *hugedir;
	void *blocked, *allowed;
	const char *iova_mode;
	uint64_t base;
	void *context;
	const char *token;
	size_t opts_size;
};

static int environments;

void spdk_env_opts_init(struct env_opts *opts)
{
	size_t claimed = opts->opts_size;

	memset(opts, 0, ENV_SIZE);
	opts->opts_size = claimed;
	opts->core_mask = "0x1";
	opts->shm_id = opts->mem_channel = opts->main_core = opts->mem_size = -1;
}

int spdk_env_init(const struct env_opts *opts)
{
	cpu_set_t one;

	if (opts->opts_size < ENV_SIZE || environments++ || (opts->no_huge && opts->iova_mode) ||
	    (opts->no_huge && opts->mem_size <= 0)) {
		return -EINVAL;
	}
	if (fault("noenv", 0)) {
		fprintf(stderr, "standin: no free hugepages reported\n");
		return -ENOMEM;
	}
	note("env core=%s mem=%d no_pci=%d no_huge=%d", opts->core_mask, opts->mem_size,
	     opts->no_pci, opts->no_huge);
	CPU_ZERO(&one); /* as DPDK does */
	CPU_SET(strtol(opts->core_mask + (opts->core_mask[0] == '['), NULL, 0), &one);
	return sched_setaffinity(0, sizeof(one), &one) ? -errno : 0;
}

int spdk_mem_register(void *vaddr, size_t len)
{
	note("register aligned=%d", ((uintptr_t)vaddr | len) % (2 << 20) == 0);
	return ((uintptr_t)vaddr | len) % (2 << 20) ? -EINVAL : 0;
}

int spdk_mem_unregister(void *vaddr, size_t len)
{
	(void)vaddr;
	(void)len;
	return 0;
}

#endif
#ifdef PART_NVME

struct trid {
	char trstring[33];
	int trtype, adrfam;
	char traddr[257], trsvcid[33], subnqn[224];
	int priority;
};

struct cpl {
	uint32_t cdw0, cdw1;
	uint16_t sqhd, sqid, cid, status;
};

typedef void (*done_fn)(void *, const struct cpl *);

struct request {
	struct request *next;
	int op; /* 1 read, 2 write, 3 flush */
	int status, age;
	void *buffer;
	uint64_t lba;
	uint32_t count;
	done_fn call;
	void *argument;
};

struct qpair {
	struct ctrlr *ctrlr;
	struct request *first;
	bool broken;
};

struct ctrlr {
	int fd;
	uint32_t sector;
	uint64_t sectors;
	bool failed;
	struct qpair *pairs[64];
};

struct ns {
	struct ctrlr *ctrlr;
};

static struct request *orphans; /* of queues that were freed */
static long commands, breaks, connects, submits, path_errors;
static unsigned seed = 1;
static struct ns spaces[8];

_Static_assert(offsetof(struct trid, subnqn) == 334 && sizeof(struct trid) == 564, "trid");

static void give(struct request *request)
{
	struct cpl cpl = {.status = (uint16_t)(request->status << 1 | 1)};

	request->call(request->argument, &cpl);
	free(request);
}

int spdk_nvme_transport_id_parse(struct trid *trid, const char *text)
{
	char key[16], value[257];
	int used;

	while (sscanf(text, " %15[^:]:%256[^ ]%n", key, value, &used) == 2) {
		if (strcmp(key, "trtype") == 0) {
			snprintf(trid->trstring, 33, "%.32s", value);
		} else if (strcmp(key, "traddr") == 0) {
			snprintf(trid->traddr, 257, "%.256s", value);
		} else if (strcmp(key, "trsvcid") == 0) {
			snprintf(trid->trsvcid, 33, "%.32s", value);
		} else if (strcmp(key, "subnqn") == 0) {
			snprintf(trid->subnqn, 224, "%.223s", value);
		} else if (strcmp(key, "adrfam") != 0) {
			return -EINVAL;
		}
		text += used;
	}
	return *text ? -EINVAL : 0;
}

bool spdk_nvme_transport_available_by_name(const char *name)
{
	return strcmp(name, "RDMA") != 0 || fault("rdma", 1);
}

void spdk_nvme_ctrlr_get_default_ctrlr_opts(uint8_t *opts, size_t claimed)
{
	memset(opts, 0, CTRLR_SIZE);
	*(uint32_t *)(opts + 0) = 1024;         /* num_io_queues */
	*(uint32_t *)(opts + 16) = 10000;       /* keep_alive_timeout_ms */
	*(uint32_t *)(opts + 24) = 32;          /* io_queue_size */
	*(size_t *)(opts + 592) = claimed;      /* opts_size */
}

static int open_file(const struct trid *trid)
{
	const char *folder = getenv("STANDIN_FOLDER");
	char path[1024];

	snprintf(path, sizeof(path), "%s/%s", folder ? folder : ".",
		 trid->subnqn[0] ? trid->subnqn : trid->traddr);
	return open(path, O_RDWR | O_CLOEXEC);
}

struct ctrlr *spdk_nvme_connect(const struct trid *trid, const uint8_t *opts, size_t claimed)
{
	long refused = fault("refuse", 0);
	struct ctrlr *ctrlr;
	struct stat found;
	int fd;

	note("connect %s %s:%s %s queues=%u kato=%u depth=%u hostnqn=%s digests=%u%u ack=%u",
	     trid->trstring, trid->traddr, trid->trsvcid, trid->subnqn, *(uint32_t *)opts,
	     *(uint32_t *)(opts + 16), *(uint32_t *)(opts + 24), (const char *)opts + 28, opts[580],
	     opts[581], opts[583]);
	if (claimed < CTRLR_SIZE || *(size_t *)(opts + 592) < CTRLR_SIZE) {
		fprintf(stderr, "standin: controller options of %zu bytes are too small\n", claimed);
		return NULL;
	}
	if (connects > 0 && (refused < 0 || connects <= refused)) {
		connects++;
		fprintf(stderr, "standin: connection refused\n");
		return NULL;
	}
	fd = open_file(trid);
	if (fd < 0 || fstat(fd, &found)) {
		fprintf(stderr, "standin: no such subsystem: %s\n", strerror(errno));
		return NULL;
	}
	ctrlr = calloc(1, sizeof(*ctrlr));
	ctrlr->fd = fd;
	ctrlr->sector = fault("sector", 4096);
	ctrlr->sectors = found.st_size / ctrlr->sector;
	if (connects++ > 0 && fault("shrink", 0)) {
		ctrlr->sectors /= 2;
	}
	return ctrlr;
}

int spdk_nvme_detach(struct ctrlr *ctrlr)
{
	note("detach");
	close(ctrlr->fd);
	free(ctrlr);
	return 0;
}

const uint8_t *spdk_nvme_ctrlr_get_data(struct ctrlr *ctrlr)
{
	static uint8_t data[4096];
	long epoch = fault("epoch", 0); /* 1: always the same, 2: another one each time */

	(void)ctrlr;
	memset(data, 0, sizeof(data));
	memcpy(data + 3072, epoch ? "hyades-epoch-1:" : "                ", 16);
	memset(data + 3088, epoch ? (int)(epoch == 1 ? 1 : connects) : 0, 16);
	return data;
}

bool spdk_nvme_ctrlr_is_failed(struct ctrlr *ctrlr)
{
	return ctrlr->failed;
}

void spdk_nvme_ctrlr_fail(struct ctrlr *ctrlr)
{
	ctrlr->failed = true;
}

int32_t spdk_nvme_ctrlr_process_admin_completions(struct ctrlr *ctrlr)
{
	return ctrlr->failed ? -ENXIO : 0;
}

uint32_t spdk_nvme_ctrlr_get_next_active_ns(struct ctrlr *ctrlr, uint32_t previous)
{
	(void)ctrlr;
	return (long)previous < fault("namespaces", 1) ? previous + 1 : 0;
}

uint32_t spdk_nvme_ctrlr_get_first_active_ns(struct ctrlr *ctrlr)
{
	return spdk_nvme_ctrlr_get_next_active_ns(ctrlr, 0);
}

struct ns *spdk_nvme_ctrlr_get_ns(struct ctrlr *ctrlr, uint32_t number)
{
	spaces[number].ctrlr = ctrlr;
	return &spaces[number];
}

uint32_t spdk_nvme_ns_get_sector_size(struct ns *ns)
{
	return ns->ctrlr->sector;
}

uint64_t spdk_nvme_ns_get_num_sectors(struct ns *ns)
{
	return ns->ctrlr->sectors;
}

uint32_t spdk_nvme_ns_get_max_io_xfer_size(struct ns *ns)
{
	(void)ns;
	return fault("maxio", 1 << 20);
}

uint32_t spdk_nvme_ns_get_md_size(struct ns *ns)
{
	(void)ns;
	return fault("meta", 0);
}

uint32_t spdk_nvme_ns_get_flags(struct ns *ns)
{
	(void)ns;
	return fault("noflush", 0) ? 0 : 2;
}

const uint8_t *spdk_nvme_ns_get_uuid(const struct ns *ns)
{
	static uint8_t uuid[16];

	(void)ns;
	uuid[0] = fault("other", 0) ? connects : 1;
	return uuid;
}

const uint8_t *spdk_nvme_ns_get_nguid(const struct ns *ns)
{
	(void)ns;
	return NULL;
}

void spdk_nvme_ctrlr_get_default_io_qpair_opts(struct ctrlr *ctrlr, uint8_t *opts, size_t claimed)
{
	(void)ctrlr;
	(void)claimed;
	memset(opts, 0, QPAIR_SIZE);
	*(uint32_t *)(opts + 4) = 128;
	*(uint32_t *)(opts + 8) = 512;
}

struct qpair *spdk_nvme_ctrlr_alloc_io_qpair(struct ctrlr *ctrlr, const uint8_t *opts, size_t claimed)
{
	struct qpair *qpair;

	if (claimed < QPAIR_SIZE) {
		return NULL;
	}
	note("queue requests=%u", *(uint32_t *)(opts + 8));
	qpair = calloc(1, sizeof(*qpair));
	qpair->ctrlr = ctrlr;
	return qpair;
}

static void abort_all(struct qpair *qpair)
{
	struct request *request;

	while ((request = qpair->first) != NULL) {
		qpair->first = request->next;
		request->status = 0x08; /* aborted: submission queue deletion */
		give(request);
	}
}

int spdk_nvme_ctrlr_free_io_qpair(struct qpair *qpair)
{
	struct request **end = &orphans;

	if (fault("orphan", 0)) {
		while (*end) {
			end = &(*end)->next;
		}
		*end = qpair->first;
	} else {
		abort_all(qpair);
	}
	free(qpair);
	return 0;
}

int spdk_nvme_ctrlr_reconnect_io_qpair(struct qpair *qpair)
{
	note("reconnect");
	if (qpair->ctrlr->failed) {
		return -ENXIO;
	}
	qpair->broken = false;
	return 0;
}

static int submit(struct qpair *qpair, struct request template)
{
	struct request **end = &qpair->first, *request;
	long every = fault("enomem", 0);

	if (qpair->broken) {
		return -ENXIO;
	}
	if (every && ++submits % every == 0) {
		return -ENOMEM;
	}
	commands++;
	if (commands == fault("crash", 0)) {
		raise(SIGKILL);
	}
	if (commands == fault("stop", 0)) {
		raise(SIGSTOP);
	}
	if (fault("break", 0) && commands % fault("break", 0) == 0 && breaks < fault("breaks", 1)) {
		breaks++;
		qpair->broken = true;
		qpair->ctrlr->failed = fault("fail", 0);
		if (!fault("orphan", 0)) {
			abort_all(qpair);
		}
		return -ENXIO;
	}
	request = malloc(sizeof(*request));
	*request = template;
	while (*end) {
		end = &(*end)->next;
	}
	*end = request;
	return 0;
}

int spdk_nvme_ns_cmd_read(struct ns *ns, struct qpair *qpair, void *buffer, uint64_t lba,
			  uint32_t count, done_fn call, void *argument, uint32_t flags)
{
	(void)ns;
	(void)flags;
	return submit(qpair, (struct request){.op = 1, .buffer = buffer, .lba = lba, .count = count,
					      .call = call, .argument = argument});
}

int spdk_nvme_ns_cmd_write(struct ns *ns, struct qpair *qpair, void *buffer, uint64_t lba,
			   uint32_t count, done_fn call, void *argument, uint32_t flags)
{
	(void)ns;
	(void)flags;
	return submit(qpair, (struct request){.op = 2, .buffer = buffer, .lba = lba, .count = count,
					      .call = call, .argument = argument});
}

int spdk_nvme_ns_cmd_flush(struct ns *ns, struct qpair *qpair, done_fn call, void *argument)
{
	(void)ns;
	return submit(qpair, (struct request){.op = 3, .call = call, .argument = argument});
}

static int status_of(const struct request *request, const struct ctrlr *ctrlr)
{
	uint64_t end = request->lba + request->count;

	if (request->op == 3) {
		return 0;
	}
	if (end > ctrlr->sectors) {
		return 0x80; /* LBA out of range */
	}
	if (end > (uint64_t)fault("media", INT64_MAX) && (long)request->lba < fault_end("media", 0)) {
		return request->op == 1 ? 0x281 : 0x280; /* unrecovered read error, write fault */
	}
	if (request->op == 2 && end > (uint64_t)fault("full", INT64_MAX)) {
		return 0x81; /* capacity exceeded */
	}
	if (request->op == 1 && (long)request->lba == fault("path", -1) &&
	    path_errors < fault_end("path", 0)) {
		path_errors++;
		return 0x303; /* asymmetric access transition */
	}
	if (request->op == 1 && (long)request->lba == fault("bad", -1)) {
		return fault_end("bad", 0);
	}
	return 0;
}

static void run(struct request *request, struct ctrlr *ctrlr)
{
	size_t bytes = (size_t)request->count * ctrlr->sector, done = 0;
	off_t at = (off_t)request->lba * ctrlr->sector;

	request->status = status_of(request, ctrlr);
	if (request->op == 3) {
		note("flush");
		fdatasync(ctrlr->fd);
	}
	while (request->status == 0 && done < bytes) {
		char *place = (char *)request->buffer + done;
		ssize_t moved = request->op == 1
				? pread(ctrlr->fd, place, bytes - done, at + done)
				: pwrite(ctrlr->fd, place, bytes - done, at + done);
		if (moved <= 0) {
			request->status = 0x06; /* internal device error */
			return;
		}
		done += moved;
	}
}

int32_t spdk_nvme_qpair_process_completions(struct qpair *qpair, uint32_t most)
{
	struct request **at = &qpair->first, *request;
	long hold = fault("hold", 0), count = 0, muted = fault("mute", 0);

	(void)most;
	if (qpair->broken) {
		return -ENXIO;
	}
	while ((request = orphans) != NULL) { /* callbacks of queues that are gone */
		orphans = request->next;
		request->status = 0;
		give(request);
	}
	if (muted && connects == 1 && commands > muted) {
		return 0;
	}
	while ((request = *at) != NULL) {
		request->age++;
		if (hold && (request->age <= hold || rand_r(&seed) % 2)) {
			at = &request->next; /* others overtake it */
			continue;
		}
		*at = request->next;
		run(request, qpair->ctrlr);
		give(request);
		count++;
	}
	return count;
}

#endif
