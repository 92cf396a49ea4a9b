package conntrack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/escape"
	"spillway.dev/spillway/internal/node/kernel"
)

// Namespace is a network namespace of this machine.
type Namespace struct {
	Inode uint64   `json:"inode"`           // its number in /proc/PID/ns/net
	Names []string `json:"names,omitempty"` // as bound below /run/netns and the like, sorted
	PID   int      `json:"pid,omitempty"`   // the lowest of the processes in it; 0 if none was found
	// Command is the name of that process.
	Command string `json:"command,omitempty"`
	// Own reports that it is the caller's namespace.
	Own bool `json:"own,omitempty"`

	path string
}

// String returns a name of the namespace, or else its first process.
func (n Namespace) String() string {
	switch {
	case n.Own:
		return "(here)"
	case len(n.Names) > 0:
		return n.Names[0]
	case n.PID != 0:
		return fmt.Sprintf("%s[%d]", n.Command, n.PID)
	}
	return n.numbered()
}

// rank is the place of the namespace in a list. The names are those that root bound, such as a
// pod's; a process makes as many others as it likes.
func (n Namespace) rank() int {
	switch {
	case n.Own:
		return 0
	case len(n.Names) > 0:
		return 1
	}
	return 2
}

// Is reports whether s identifies the namespace. s may be the result of String, one of
// its names, the id of a process in it, or "here" for the caller's own.
func (n Namespace) Is(s string) bool {
	if s == n.String() || slices.Contains(n.Names, s) || n.Own && s == "here" {
		return true
	}
	if _, err := strconv.Atoi(s); err != nil {
		return false
	}
	inode, err := namespaceInode("/proc/" + s + "/ns/net")
	return err == nil && inode == n.Inode
}

// numbered returns the namespace as readlink shows it.
func (n Namespace) numbered() string { return fmt.Sprintf("net:[%d]", n.Inode) }

// nameDirs are the directories in which container runtimes and iproute2 bind network
// namespaces.
var nameDirs = []string{"/run/netns", "/run/docker/netns"}

// Namespaces finds the network namespaces of the machine by name and by process, the
// caller's own first, then those with names. A container must share the host's process ids and /run/netns to
// see all of them. err holds what cannot be read; the list holds the others even then.
func Namespaces() (list []Namespace, err error) {
	return findNamespaces("/proc", nameDirs)
}

// NamespacesOf finds the network namespaces of the processes below a cgroup2
// directory, and the caller's own, which comes first.
func NamespacesOf(cgroup string) ([]Namespace, error) {
	all, err := Namespaces()
	wanted := map[uint64]bool{}
	walkErr := filepath.WalkDir(cgroup, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil // the cgroup was removed meanwhile
		}
		pids, _ := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		for pid := range strings.FieldsSeq(string(pids)) {
			if inode, err := namespaceInode(filepath.Join("/proc", pid, "ns/net")); err == nil {
				wanted[inode] = true
			}
		}
		return nil
	})
	list := slices.DeleteFunc(all, func(n Namespace) bool { return !n.Own && !wanted[n.Inode] })
	return list, errors.Join(err, walkErr)
}

func findNamespaces(proc string, dirs []string) ([]Namespace, error) {
	found := map[uint64]*Namespace{}
	at := func(inode uint64, path string) *Namespace {
		n := found[inode]
		if n == nil {
			n = &Namespace{Inode: inode, path: path}
			found[inode] = n
		}
		return n
	}
	var errs []error
	if inode, err := namespaceInode(ownNamespacePath); err != nil {
		errs = append(errs, fmt.Errorf("find own network namespace: %w", err))
	} else {
		at(inode, ownNamespacePath).Own = true
	}
	for _, dir := range dirs {
		names, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("list network namespaces: %w", err))
		}
		for _, name := range names {
			path := filepath.Join(dir, name.Name())
			// A file without a bound namespace is a leftover name.
			if inode, err := namespaceInode(path); err == nil {
				n := at(inode, path)
				n.Names = append(n.Names, name.Name())
			}
		}
	}
	errs = append(errs, addProcesses(proc, at))
	list := make([]Namespace, 0, len(found))
	for _, n := range found {
		slices.Sort(n.Names)
		list = append(list, *n)
	}
	slices.SortFunc(list, func(a, b Namespace) int {
		return cmp.Or(cmp.Compare(a.rank(), b.rank()), cmp.Compare(a.String(), b.String()), cmp.Compare(a.Inode, b.Inode))
	})
	return list, errors.Join(errs...)
}

// addProcesses adds the namespaces of processes. It skips processes that end meanwhile or
// that it may not read.
func addProcesses(proc string, at func(uint64, string) *Namespace) error {
	d, err := os.Open(proc)
	if err != nil {
		return fmt.Errorf("list processes: %w", err)
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if err != nil {
		return fmt.Errorf("list processes: %w", err)
	}
	denied := 0
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		path := filepath.Join(proc, name, "ns/net")
		link, err := os.Readlink(path)
		if errors.Is(err, os.ErrPermission) {
			denied++
		}
		number, isNet := strings.CutPrefix(link, "net:[")
		inode, perr := strconv.ParseUint(strings.TrimSuffix(number, "]"), 10, 64)
		if err != nil || !isNet || perr != nil {
			continue
		}
		if n := at(inode, path); n.PID == 0 || pid < n.PID {
			n.PID = pid
			comm, _ := os.ReadFile(filepath.Join(proc, name, "comm"))
			n.Command = escape.Text(strings.TrimSpace(string(comm))) // any bytes: its process chooses them
		}
	}
	if denied > 0 {
		processes := "1 process"
		if denied > 1 {
			processes = fmt.Sprintf("%d processes", denied)
		}
		return fmt.Errorf("read the network namespaces of %s: %w: network namespaces of pods may be missing: run it as root with CAP_SYS_PTRACE",
			processes, os.ErrPermission)
	}
	return nil
}

// namespaceInode returns the inode of the namespace that is bound to a path.
func namespaceInode(path string) (uint64, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil {
		return 0, err
	}
	if fs.Type != unix.NSFS_MAGIC {
		return 0, errors.New("not a namespace")
	}
	var st unix.Stat_t
	err := unix.Stat(path, &st)
	return st.Ino, err
}

// OwnNamespace returns the calling thread's network namespace. Its Inode is 0 if it
// cannot be read.
func OwnNamespace() Namespace {
	inode, _ := namespaceInode(ownNamespacePath)
	return Namespace{Inode: inode, Own: true, path: ownNamespacePath}
}

const ownNamespacePath = "/proc/thread-self/ns/net"

// EnterCommand returns the prefix that runs a shell command in the namespace: "nsenter
// --net=PATH ", quoted for a shell, or "" for the caller's own.
func (n Namespace) EnterCommand() string {
	if n.Own {
		return ""
	}
	return "nsenter " + escape.Shell("--net="+n.path) + " "
}

// Enter runs f in the namespace, on a separate thread unless the namespace is the
// caller's. f must not start goroutines that rely on the namespace. The error for a
// vanished namespace is os.ErrNotExist.
func (n Namespace) Enter(f func() error) error {
	h, err := netns.GetFromPath(n.path)
	if err != nil {
		return fmt.Errorf("open network namespace %s: %w", n, err)
	}
	defer h.Close()
	// Another process may have the id by now. While a name is made or removed, it is a plain file.
	if inode, err := namespaceInode(fmt.Sprintf("/proc/self/fd/%d", h)); err != nil || inode != n.Inode {
		return fmt.Errorf("enter network namespace %s: %w", n, os.ErrNotExist)
	}
	return kernel.Do(h, f)
}

// Do enters the namespace and calls f with its conntrack.
func (n Namespace) Do(f func(*Conn) error) error {
	return n.Enter(func() error {
		c, err := Open()
		if err != nil {
			return err
		}
		defer c.Close()
		return f(c)
	})
}

// Report is the state of conntrack in one namespace.
type Report struct {
	Namespace    Namespace      `json:"namespace"`
	Entries      int            `json:"entries"`
	Counters     Counters       `json:"counters"`
	Expectations map[string]int `json:"expectations,omitempty"`
	Limits       Limits         `json:"limits"`
}

// InUse reports whether conntrack is or was active in the namespace.
func (r Report) InUse() bool { return r.Entries > 0 || r.Counters.Any() || len(r.Expectations) > 0 }

// readReport reads the Report of one namespace. It does not read the entries.
func readReport(ctx context.Context, n Namespace) (Report, error) {
	return read(ctx, n, (*Conn).Report)
}

// readCounts reads the Report of one namespace without Limits other than Max. The
// limits take most of the time of readReport, which matters when many namespaces are read
// repeatedly.
func readCounts(ctx context.Context, n Namespace) (Report, error) {
	return read(ctx, n, (*Conn).counts)
}

func read(ctx context.Context, n Namespace, what func(*Conn, context.Context, Namespace) (Report, error)) (Report, error) {
	r := Report{Namespace: n}
	err := n.Do(func(c *Conn) (err error) {
		r, err = what(c, ctx, n)
		return err
	})
	if err != nil {
		return r, fmt.Errorf("read conntrack of %s: %w", n, err)
	}
	return r, nil
}

// Report reads the Report of the namespace n, which must be the namespace of the Conn
// and of the calling thread.
func (c *Conn) Report(ctx context.Context, n Namespace) (Report, error) {
	r, err := c.counts(ctx, n)
	if err != nil {
		return r, err
	}
	r.Limits, err = ReadLimits()
	return r, err
}

// counts reads the cheap parts of a Report.
func (c *Conn) counts(ctx context.Context, n Namespace) (Report, error) {
	r := Report{Namespace: n}
	entries, limit, err := c.Size()
	if err != nil {
		return r, err
	}
	r.Entries, r.Limits.Max = int(entries), int(limit)
	if r.Counters, err = c.Stats(ctx); err != nil {
		return r, err
	}
	r.Expectations, err = c.Expectations(ctx)
	return r, err
}

// ErrNothingRead reports that conntrack could be read in no network namespace.
var ErrNothingRead = errors.New("conntrack could be read in no network namespace")

// ReadAll reads the namespaces in which conntrack is in use. It omits a namespace that
// vanishes meanwhile. err names each namespace that cannot be read, or the first and the
// number of others for a lack of rights; if none can be read, err is ErrNothingRead.
func ReadAll(ctx context.Context) ([]Report, error) {
	list, err := Namespaces()
	return readAll(ctx, list, err, readReport)
}

// readAll is ReadAll for the given namespaces, which read reads; err is the reason why
// others are missing from the list.
func readAll(ctx context.Context, list []Namespace, err error, read func(context.Context, Namespace) (Report, error)) ([]Report, error) {
	errs := []error{err}
	var out []Report
	failed, denied := 0, 0
	for _, n := range list {
		r, err := read(ctx, n)
		switch {
		case errors.Is(err, ErrUnsupported):
			return nil, err // one kernel for all of them
		case errors.Is(err, os.ErrNotExist):
		case errors.Is(err, os.ErrPermission):
			if denied++; denied == 1 {
				errs = append(errs, fmt.Errorf("%w: run it as root with CAP_SYS_ADMIN and CAP_NET_ADMIN", err))
			}
		case err != nil:
			errs = append(errs, err)
			failed++
		case r.InUse():
			out = append(out, r)
		}
	}
	if denied > 1 {
		errs = append(errs, fmt.Errorf("read conntrack of other network namespaces (%d): %w", denied-1, os.ErrPermission))
	}
	if failed+denied == len(list) {
		errs = slices.Insert(errs, 0, ErrNothingRead)
	}
	return out, errors.Join(errs...)
}
