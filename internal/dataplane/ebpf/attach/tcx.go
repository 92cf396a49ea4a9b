package attach

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// direction is the direction of packets from the interface's view.
type direction string

const (
	ingress direction = "ingress"
	egress  direction = "egress"
)

func (d direction) tcx() ebpf.AttachType {
	if d == ingress {
		return ebpf.AttachTCXIngress
	}
	return ebpf.AttachTCXEgress
}

// hook is an interface and a direction.
type hook struct {
	ifindex int
	dir     direction
}

// program is a program with its kernel id, which costs a system call.
type program struct {
	*ebpf.Program
	id ebpf.ProgramID
}

// tcxHooks attaches by tcx links (Linux 6.6), pinned as DIR/IFINDEX_DIRECTION.
// Interface names would read better, but bpffs allows no dot in a name and
// interfaces are renamed.
type tcxHooks struct {
	dir   string
	links map[hook]*tcxLink
}

type tcxLink struct {
	link.Link
	id   link.ID
	prog ebpf.ProgramID
}

// newNameSuffix marks a pin that will be renamed. A crash may leave such a pin.
const newNameSuffix = "_new"

// load takes over the pinned links of an earlier run. It removes the pins of links that
// are not attached in this namespace any more.
func (t *tcxHooks) load() error {
	t.links = make(map[hook]*tcxLink)
	entries, err := os.ReadDir(t.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list pinned links: %w", err)
	}
	for _, e := range entries {
		if e.IsDir() {
			continue // foreign
		}
		path := filepath.Join(t.dir, e.Name())
		h, ok := parseHook(e.Name())
		if ok {
			if ok, err = t.takeOver(h, path); err != nil {
				return err
			}
		}
		if ok {
			continue
		}
		if err := os.Remove(path); err != nil {
			return fmt.Errorf("remove stale link %s: %w", path, err)
		}
	}
	return nil
}

// takeOver reports whether the pin is of a link that is attached to the hook. A pin
// that cannot be opened may be of one, and removing it would detach the serving
// program.
func (t *tcxHooks) takeOver(h hook, path string) (ok bool, err error) {
	l, err := link.LoadPinnedLink(path, nil)
	if passing(err) {
		return false, fmt.Errorf("open pinned link %s: %w", path, err)
	}
	if err != nil {
		return false, nil
	}
	info, err := l.Info()
	if err != nil || !attachedHere(h, info) {
		l.Close()
		return false, nil
	}
	t.links[h] = &tcxLink{Link: l, id: info.ID, prog: info.Program}
	return true, nil
}

// passing reports whether another try may succeed.
func passing(err error) bool {
	for _, e := range []error{unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.EPERM, unix.EACCES, unix.EINTR} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// attachedHere reports whether the link is attached to the hook's interface in this
// namespace. The link alone does not show that: its interface may have moved to another
// namespace and have the same index there.
func attachedHere(h hook, info *link.Info) bool {
	tcx := info.TCX()
	if tcx == nil || int(tcx.Ifindex) != h.ifindex || ebpf.AttachType(tcx.AttachType) != h.dir.tcx() {
		return false
	}
	res, err := link.QueryPrograms(link.QueryOptions{Target: h.ifindex, Attach: h.dir.tcx()})
	if err != nil {
		return false
	}
	for i := range res.Programs {
		if id, ok := res.Programs[i].LinkID(); ok && id == info.ID {
			return true
		}
	}
	return false
}

// ensure makes p the hook's program. It replaces an existing program in place, so that
// the hook is never empty.
func (t *tcxHooks) ensure(h hook, p program, verify bool) error {
	if held := t.links[h]; held != nil {
		if !verify && held.prog == p.id {
			return nil
		}
		if err := t.refresh(h, held, p, verify); err == nil {
			return nil
		}
		// It is attached to nothing: the interface was deleted and created again, or
		// another program detached the link.
	}
	return t.attach(h, p)
}

func (t *tcxHooks) refresh(h hook, held *tcxLink, p program, verify bool) error {
	if verify {
		info, err := held.Info()
		if err != nil {
			return err
		}
		if !attachedHere(h, info) {
			return errors.New("link is detached")
		}
		held.prog = info.Program
	}
	if held.prog != p.id {
		if err := held.Update(p.Program); err != nil {
			return err
		}
		held.prog = p.id
	}
	if !verify {
		return nil
	}
	if _, err := os.Stat(t.path(h)); errors.Is(err, fs.ErrNotExist) {
		return t.pinAgain(h, held)
	}
	return nil
}

// pinAgain pins a link whose pin is missing.
func (t *tcxHooks) pinAgain(h hook, held *tcxLink) error {
	if err := held.Unpin(); err != nil {
		return err
	}
	return held.Pin(t.path(h))
}

func (t *tcxHooks) attach(h hook, p program) error {
	if err := os.MkdirAll(t.dir, 0o700); err != nil {
		return fmt.Errorf("create directory for pinned links: %w", err)
	}
	// First in line: a program in front that returns TC_ACT_OK would end the chain.
	l, err := link.AttachTCX(link.TCXOptions{
		Interface: h.ifindex, Program: p.Program, Attach: h.dir.tcx(), Anchor: link.Head(),
	})
	if err != nil {
		return err
	}
	info, err := l.Info()
	if err == nil {
		err = pinOver(l, t.path(h))
	}
	if err != nil {
		l.Close()
		return err
	}
	if old := t.links[h]; old != nil {
		old.Close()
	}
	t.links[h] = &tcxLink{Link: l, id: info.ID, prog: p.id}
	return nil
}

// pinOver pins l at path, and atomically releases a link pinned there.
func pinOver(l link.Link, path string) error {
	tmp := path + newNameSuffix
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("pin link: %w", err)
	}
	if err := l.Pin(tmp); err != nil {
		return fmt.Errorf("pin link: %w", err)
	}
	if err := os.Rename(tmp, path); err != nil {
		_ = os.Remove(tmp)
		return fmt.Errorf("pin link: %w", err)
	}
	return nil
}

func (t *tcxHooks) drop(h hook) error {
	err := os.Remove(t.path(h))
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if held := t.links[h]; held != nil {
		held.Close()
		delete(t.links, h)
	}
	return err
}

func (t *tcxHooks) attached() map[hook]ebpf.ProgramID {
	res := make(map[hook]ebpf.ProgramID, len(t.links))
	for h, l := range t.links {
		res[h] = l.prog
	}
	return res
}

func (t *tcxHooks) path(h hook) string {
	return filepath.Join(t.dir, fmt.Sprintf("%d_%s", h.ifindex, h.dir))
}

func (t *tcxHooks) close() {
	for _, l := range t.links {
		l.Close()
	}
	t.links = nil
}

func parseHook(name string) (hook, bool) {
	index, dir, _ := strings.Cut(name, "_")
	n, err := strconv.Atoi(index)
	if err != nil || dir != string(ingress) && dir != string(egress) {
		return hook{}, false
	}
	return hook{n, direction(dir)}, true
}

// vanished reports whether err says that the interface does not exist any more.
func vanished(err error) bool {
	return errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENXIO)
}
