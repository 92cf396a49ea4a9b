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
	// Own says that it is the caller's.
	Own bool `json:"own,omitempty"`

	path string
}

// String is what people may call the namespace: a name, or its first process.
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

// Is reports whether people may mean the namespace by s: what String gives, one
// of its names, a process in it by its id, or "here".
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

// numbered is the namespace as readlink shows it.
func (n Namespace) numbered() string { return fmt.Sprintf("net:[%d]", n.Inode) }

// nameDirs are where container runtimes and iproute2 bind network namespaces.
var nameDirs = []string{"/run/netns", "/run/docker/netns"}

// Namespaces finds the network namespaces of the machine by name and by
// process, the caller's own first. A container must share the host's process
// ids and /run/netns to see them all. What cannot be read is in err; the others
// are there all the same.
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
			return nil // a cgroup that has gone meanwhile
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
	if inode, err := namespaceInode(ownNamespace); err != nil {
		errs = append(errs, fmt.Errorf("find own network namespace: %w", err))
	} else {
		at(inode, ownNamespace).Own = true
	}
	for _, dir := range dirs {
		names, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("list network namespaces: %w", err))
		}
		for _, name := range names {
			path := filepath.Join(dir, name.Name())
			// A file that nothing is bound to is a name left over.
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
		return cmp.Or(-cmp.Compare(strconv.FormatBool(a.Own), strconv.FormatBool(b.Own)), cmp.Compare(a.String(), b.String()), cmp.Compare(a.Inode, b.Inode))
	})
	return list, errors.Join(errs...)
}

// addProcesses adds the namespaces that processes are in. A process that ends
// meanwhile, and one that may not be looked at, is passed over.
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
			n.Command = strings.TrimSpace(string(comm))
		}
	}
	if denied > 0 {
		return fmt.Errorf("look into %d processes: %w: network namespaces that only they hold are not shown; it takes root with CAP_SYS_PTRACE", denied, os.ErrPermission)
	}
	return nil
}

// namespaceInode is the number of the namespace behind a path of a name.
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

// Here is the calling thread's own network namespace. Its Inode is 0 if it cannot
// be told.
func Here() Namespace {
	inode, _ := namespaceInode(ownNamespace)
	return Namespace{Inode: inode, Own: true, path: ownNamespace}
}

const ownNamespace = "/proc/thread-self/ns/net"

// EnterCommand is what a command is written behind to run in the namespace:
// "nsenter --net=PATH ", quoted for a shell, and nothing for the caller's own.
func (n Namespace) EnterCommand() string {
	if n.Own {
		return ""
	}
	return "nsenter " + escape.Shell("--net="+n.path) + " "
}

// Enter runs f in the namespace, on a thread of its own unless it is the
// caller's. f must not start goroutines that count on being there. A namespace
// that vanished is os.ErrNotExist.
func (n Namespace) Enter(f func() error) error {
	h, err := netns.GetFromPath(n.path)
	if err != nil {
		return fmt.Errorf("open network namespace %s: %w", n, err)
	}
	defer h.Close()
	return kernel.Do(h, func() error {
		// A process id may be another's by now.
		if inode, err := namespaceInode(ownNamespace); err != nil || inode != n.Inode {
			return fmt.Errorf("enter network namespace %s: %w", n, os.ErrNotExist)
		}
		return f()
	})
}

// Do is Enter with the conntrack of the namespace.
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

// Report is the conntrack of one namespace as it stands.
type Report struct {
	Namespace    Namespace      `json:"namespace"`
	Entries      int            `json:"entries"`
	Counters     Counters       `json:"counters"`
	Expectations map[string]int `json:"expectations,omitempty"`
	Limits       Limits         `json:"limits"`
}

// InUse reports whether conntrack does anything in the namespace, or did.
func (r Report) InUse() bool { return r.Entries > 0 || r.Counters.Any() || len(r.Expectations) > 0 }

// Read reads the Report of one namespace. It does not read the entries.
func Read(ctx context.Context, n Namespace) (Report, error) {
	return read(ctx, n, (*Conn).Report)
}

// ReadCounts is Read without the Limits but for Max, for they take most of its
// time: for whoever reads many namespaces again and again.
func ReadCounts(ctx context.Context, n Namespace) (Report, error) {
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

// Report reads the Report of the namespace n, that of the Conn and of the
// calling thread.
func (c *Conn) Report(ctx context.Context, n Namespace) (Report, error) {
	r, err := c.counts(ctx, n)
	if err != nil {
		return r, err
	}
	r.Limits, err = ReadLimits()
	return r, err
}

// counts reads what of a Report costs little.
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

// ErrNothingRead says that conntrack could be read in no network namespace.
var ErrNothingRead = errors.New("conntrack could be read in no network namespace")

// ReadAll reads the namespaces in which conntrack is in use. One that vanishes
// meanwhile is left out; one that cannot be read is in err, and if none can,
// ErrNothingRead.
func ReadAll(ctx context.Context) ([]Report, error) {
	list, err := Namespaces()
	return readAll(ctx, list, err)
}

// readAll is ReadAll of these namespaces; err is what kept others from the list.
func readAll(ctx context.Context, list []Namespace, err error) ([]Report, error) {
	errs := []error{err}
	var out []Report
	denied := 0
	for _, n := range list {
		r, err := Read(ctx, n)
		switch {
		case errors.Is(err, ErrUnsupported):
			return nil, err // one kernel for all of them
		case errors.Is(err, os.ErrNotExist):
		case err != nil:
			errs = append(errs, err)
			denied++
		case r.InUse():
			out = append(out, r)
		}
	}
	if denied == len(list) {
		errs = slices.Insert(errs, 0, ErrNothingRead)
	}
	return out, errors.Join(errs...)
}
