/* A disk that keeps what was synced and nothing else, preloaded into the process under test.
 *
 * Below POWER_CUT_ROOT every fsync and fdatasync is passed on and then mirrored into
 * POWER_CUT_SHADOW: `inodes/N` has the content of a file as of its last sync, `entries/N` the names
 * in a directory as of its last sync. What a name leads to after a power cut is put together from
 * both (tests/kit/power_cut.py). What is unlinked stays as `graves/N`, so that no inode's number is
 * used again. POWER_CUT_LOG gets a line for each sync and rename, with its begin and end in
 * nanoseconds of the monotonic clock. POWER_CUT_DELAY_MS makes each sync slow, as a disk does.
 * Syncs of paths that contain POWER_CUT_IGNORE are passed on and mirrored nowhere.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MOST_FILES 4096

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char *root, *shadow, *ignored;
static size_t root_length;
static int log_file = -1;
static long delay_ms;

/* What was written to a file since its last sync; whole files are copied where nothing is known. */
static struct { ino_t inode; off_t low, high; } dirty[MOST_FILES];

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

__attribute__((constructor)) static void begin(void) {
    const char *log = getenv("POWER_CUT_LOG"), *delay = getenv("POWER_CUT_DELAY_MS");
    root = getenv("POWER_CUT_ROOT");
    shadow = getenv("POWER_CUT_SHADOW");
    ignored = getenv("POWER_CUT_IGNORE");
    root_length = root ? strlen(root) : 0;
    delay_ms = delay ? atol(delay) : 0;
    if (log) log_file = syscall(SYS_openat, AT_FDCWD, log,
                                O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static int fail(const char *what, const char *path) {
    dprintf(2, "power_cut: cannot %s %s: %s\n", what, path, strerror(errno));
    abort();
}

static int is_below(const char *path) {
    return root && !strncmp(path, root, root_length)
        && (path[root_length] == '/' || !path[root_length]);
}

static int path_of(int file, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_below(path);
}

static long long now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000000000LL + at.tv_nsec;
}

static void note(const char *what, long long began, const char *path, const char *more) {
    char line[2 * PATH_MAX + 100];
    if (log_file < 0) return;
    int length = snprintf(line, sizeof line, "%s %lld %lld %s%s%s\n", what, began, now(), path,
                          more ? " " : "", more ? more : "");
    if (syscall(SYS_write, log_file, line, length) != length) fail("write", "log");
}

static void touch(int file, off_t from, off_t to) {
    struct stat found;
    if (!root || fstat(file, &found) || !S_ISREG(found.st_mode)) return;
    pthread_mutex_lock(&lock);
    for (int at = 0; at < MOST_FILES; at++) {
        if (!dirty[at].inode) {
            dirty[at].inode = found.st_ino, dirty[at].low = from, dirty[at].high = to;
            break;
        }
        if (dirty[at].inode == found.st_ino) {
            if (from < dirty[at].low || dirty[at].high == 0) dirty[at].low = from;
            if (to > dirty[at].high) dirty[at].high = to;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
}

static void copy(int file, const struct stat *found) {
    char to[PATH_MAX], buffer[65536];
    off_t low = 0, high = found->st_size;
    snprintf(to, sizeof to, "%s/inodes/%lu", shadow, (unsigned long)found->st_ino);
    int known = !access(to, F_OK);
    for (int at = 0; at < MOST_FILES && dirty[at].inode; at++)
        if (dirty[at].inode == found->st_ino) {
            if (known) low = dirty[at].low, high = dirty[at].high;
            dirty[at].low = dirty[at].high = 0;
        }
    char from[64];
    snprintf(from, sizeof from, "/proc/self/fd/%d", file);
    int source = syscall(SYS_openat, AT_FDCWD, from, O_RDONLY | O_CLOEXEC);
    int target = syscall(SYS_openat, AT_FDCWD, to, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (source < 0 || target < 0) fail("mirror into", to);
    while (low < high) {
        size_t wanted = high - low < (off_t)sizeof buffer ? (size_t)(high - low) : sizeof buffer;
        ssize_t got = syscall(SYS_pread64, source, buffer, wanted, low);
        if (got <= 0) break;
        if (syscall(SYS_pwrite64, target, buffer, got, low) != got) fail("write", to);
        low += got;
    }
    if (syscall(SYS_ftruncate, target, found->st_size)) fail("truncate", to);
    syscall(SYS_close, source);
    syscall(SYS_close, target);
}

static void list(const char *path, const struct stat *found) {
    char to[PATH_MAX], unfinished[PATH_MAX + 8], line[NAME_MAX + 64];
    snprintf(to, sizeof to, "%s/entries/%lu", shadow, (unsigned long)found->st_ino);
    snprintf(unfinished, sizeof unfinished, "%s.new", to);
    int target = syscall(SYS_openat, AT_FDCWD, unfinished,
                         O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    DIR *directory = opendir(path);
    if (target < 0 || !directory) fail("list", path);
    for (struct dirent *entry; (entry = readdir(directory));) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        int length = snprintf(line, sizeof line, "%lu %c %s\n", (unsigned long)entry->d_ino,
                              entry->d_type == DT_DIR ? 'd' : 'f', entry->d_name);
        if (syscall(SYS_write, target, line, length) != length) fail("write", unfinished);
    }
    closedir(directory);
    syscall(SYS_close, target);
    if (syscall(SYS_renameat, AT_FDCWD, unfinished, AT_FDCWD, to)) fail("name", to);
}

static int sync_one(int (*real)(int), const char *what, int file) {
    char path[PATH_MAX];
    long long began = now();
    int below = path_of(file, path);
    if (below && delay_ms) usleep(1000 * delay_ms);
    int failed = real(file);
    if (failed || !below) return failed;
    struct stat found;
    if (fstat(file, &found)) fail("look at", path);
    if (!(ignored && *ignored && strstr(path, ignored)) && shadow) {
        pthread_mutex_lock(&lock);
        if (S_ISDIR(found.st_mode)) list(path, &found);
        else copy(file, &found);
        pthread_mutex_unlock(&lock);
    }
    note(what, began, path, NULL);
    return 0;
}

int fsync(int file) { REAL(int, "fsync", int); return sync_one(real, "sync", file); }
int fdatasync(int file) { REAL(int, "fdatasync", int); return sync_one(real, "sync", file); }

/* --- what is written --------------------------------------------------------------------------- */

ssize_t write(int file, const void *data, size_t size) {
    REAL(ssize_t, "write", int, const void *, size_t);
    ssize_t done = real(file, data, size);
    int error = errno;
    off_t end = done > 0 && root ? lseek(file, 0, SEEK_CUR) : -1;
    if (end >= done) touch(file, end - done, end);
    errno = error;
    return done;
}

#define WRITE_AT(name, offset) \
    ssize_t name(int file, const void *data, size_t size, offset at) { \
        REAL(ssize_t, #name, int, const void *, size_t, offset); \
        ssize_t done = real(file, data, size, at); \
        if (done > 0) touch(file, at, at + done); \
        return done; \
    }
WRITE_AT(pwrite, off_t)
WRITE_AT(pwrite64, off64_t)

#define TRUNCATE(name, offset) \
    int name(int file, offset size) { \
        REAL(int, #name, int, offset); \
        int failed = real(file, size); \
        if (!failed) touch(file, size, size); \
        return failed; \
    }
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)

/* --- what loses its name ----------------------------------------------------------------------- */

static void full_path(int directory, const char *name, char *path) {
    char base[PATH_MAX] = "";
    if (*name == '/') { snprintf(path, PATH_MAX, "%s", name); return; }
    if (directory == AT_FDCWD) { if (!getcwd(base, sizeof base)) *base = 0; }
    else path_of(directory, base);
    snprintf(path, PATH_MAX, "%.2000s/%.2000s", base, name);
}

static void bury(const char *path) {
    struct stat found;
    char grave[PATH_MAX];
    if (!shadow || !is_below(path) || lstat(path, &found) || !S_ISREG(found.st_mode)) return;
    snprintf(grave, sizeof grave, "%s/graves/%lu", shadow, (unsigned long)found.st_ino);
    if (syscall(SYS_linkat, AT_FDCWD, path, AT_FDCWD, grave, 0) && errno != EEXIST)
        fail("keep", path);
}

static int unlink_one(int directory, const char *name, int flags) {
    char path[PATH_MAX];
    full_path(directory, name, path);
    if (!(flags & AT_REMOVEDIR)) bury(path);
    return syscall(SYS_unlinkat, directory, name, flags);
}

int unlink(const char *name) { return unlink_one(AT_FDCWD, name, 0); }
int unlinkat(int directory, const char *name, int flags) {
    return unlink_one(directory, name, flags);
}

static int rename_one(int from_directory, const char *from, int to_directory, const char *to) {
    char source[PATH_MAX], target[PATH_MAX];
    long long began = now();
    full_path(from_directory, from, source);
    full_path(to_directory, to, target);
    bury(target);
    int failed = syscall(SYS_renameat, from_directory, from, to_directory, to);
    if (!failed && is_below(target)) note("rename", began, source, target);
    return failed;
}

int rename(const char *from, const char *to) { return rename_one(AT_FDCWD, from, AT_FDCWD, to); }
int renameat(int from_directory, const char *from, int to_directory, const char *to) {
    return rename_one(from_directory, from, to_directory, to);
}
