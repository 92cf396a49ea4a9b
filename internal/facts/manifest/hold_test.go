package manifest

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"spillway.dev/spillway/internal/facts/model"
)

// live is a directory and the objects served from it.
type live struct {
	*tree
	t      *testing.T
	serves map[string]string
}

func newLive(t *testing.T) *live {
	return &live{newTree(t.TempDir(), slog.New(slog.DiscardHandler)), t, map[string]string{}}
}

// expect scans the directory and compares the served objects, as "name=ip name=ip".
func (l *live) expect(want string, problems ...string) {
	l.t.Helper()
	_ = l.scan(nil)
	for n, ip := range ips(l.delta()) {
		if l.serves[n] = ip; ip == "gone" {
			delete(l.serves, n)
		}
	}
	wanted := map[string]string{}
	for _, w := range strings.Fields(want) {
		n, ip, _ := strings.Cut(w, "=")
		wanted[n] = ip
	}
	if diff := cmp.Diff(wanted, l.serves); diff != "" {
		l.t.Errorf("served: %s", diff)
	}
	if got := l.problems(); len(got) != len(problems) {
		l.t.Errorf("problems:\n%swant %q", lines(got), problems)
	} else {
		for i, p := range got {
			if !strings.Contains(p.String(), problems[i]) {
				l.t.Errorf("problem %q, want %q", p, problems[i])
			}
		}
	}
}

func (l *live) write(name string, docs ...string) {
	l.t.Helper()
	write(l.t, l.dir, name, strings.Join(docs, "---\n"))
}

const badYAML = "kind: [\n"

func TestBadDocumentHoldsItsObject(t *testing.T) {
	l := newLive(t)
	l.write("m.yaml", service("a", "10.0.0.1"), service("b", "10.0.0.2"), service("c", "10.0.0.3"))
	l.expect("a=10.0.0.1 b=10.0.0.2 c=10.0.0.3")
	// b has a bad field, a moves on, c goes.
	l.write("m.yaml", service("a", "10.0.0.9"), service("b", "10.0.0.302"))
	l.expect("a=10.0.0.9 b=10.0.0.2", "document 2 (Service default/b): spec.clusterIP")
	// Still bad, in another way, and beside another file.
	l.write("m.yaml", service("b", "10.0.0.4")+"x: y\n")
	l.expect("b=10.0.0.2", "document 1 (Service default/b): x: is unknown")
	l.write("m.yaml", service("b", "10.0.0.4"))
	l.expect("b=10.0.0.4")
}

func TestUnreadableDocumentHoldsTheFile(t *testing.T) {
	l := newLive(t)
	l.write("m.yaml", service("a", "10.0.0.1"), service("b", "10.0.0.2"))
	l.write("n.yaml", service("other", "10.0.1.1"))
	l.expect("a=10.0.0.1 b=10.0.0.2 other=10.0.1.1")
	l.write("m.yaml", service("a", "10.0.0.9"), badYAML)
	l.write("n.yaml", "# gone\n")
	l.expect("a=10.0.0.9 b=10.0.0.2", "m.yaml, document 2: line 6 is not YAML")
	l.write("m.yaml", service("a", "10.0.0.9"))
	l.expect("a=10.0.0.9")
}

func TestMisspeltKindHoldsByName(t *testing.T) {
	l := newLive(t)
	l.write("m.yaml", service("a", "10.0.0.1"), service("b", "10.0.0.2"))
	l.expect("a=10.0.0.1 b=10.0.0.2")
	l.write("m.yaml", strings.Replace(service("a", "10.0.0.1"), "Service", "Sevice", 1))
	l.expect("a=10.0.0.1", `"Sevice" is unknown`)
}

func TestForeignObjectsHoldNothing(t *testing.T) {
	l := newLive(t)
	foreign := "apiVersion: cert-manager.io/v1\nkind: Certificate\nmetadata: {name: a}\n"
	l.write("m.yaml", service("a", "10.0.0.1"), foreign)
	l.expect("a=10.0.0.1")
	l.write("m.yaml", foreign)
	l.expect("")
}

func TestUnreadableFileHoldsItsObjects(t *testing.T) {
	l := newLive(t)
	path := filepath.Join(l.dir, "m.yaml")
	l.write("m.yaml", service("a", "10.0.0.1"))
	l.expect("a=10.0.0.1")
	l.write("m.yaml")
	l.expect("a=10.0.0.1", "m.yaml: is empty")
	if err := os.Truncate(path, maxFileSize+1); err != nil {
		t.Fatal(err)
	}
	l.expect("a=10.0.0.1", "m.yaml: is larger than 16 MiB")
	_ = os.Remove(path)
	if err := os.Symlink("nowhere", path); err != nil {
		t.Fatal(err)
	}
	l.expect("a=10.0.0.1", "m.yaml: is a symbolic link to a file that does not exist")
	_ = os.Remove(path)
	l.write("m.yaml", service("a", "10.0.0.1"))
	l.expect("a=10.0.0.1")
	_ = os.Remove(path)
	l.expect("")
}

func TestTheFileThatServesAnObjectGoesOnServingIt(t *testing.T) {
	for _, names := range [][2]string{{"b.yaml", "a.yaml"}, {"a.yaml", "b.yaml"}} {
		first, second := names[0], names[1]
		l := newLive(t)
		l.write(first, service("a", "10.0.0.1"))
		l.expect("a=10.0.0.1")
		rival := second + ", document 1 (Service default/a): metadata.name: is also in " + first + ", whose version is served"
		l.write(second, service("a", "10.0.0.2"))
		l.expect("a=10.0.0.1", rival)
		l.write(first, service("a", "10.0.0.3")) // an edit does not change the serving file
		l.expect("a=10.0.0.3", rival)
		l.write(first, "# it left\n")
		l.expect("a=10.0.0.2")
		l.write(first, service("a", "10.0.0.1")) // then the other file serves
		l.expect("a=10.0.0.2", "is also in "+second+"")
		_ = os.Remove(filepath.Join(l.dir, second))
		l.expect("a=10.0.0.1")
		_ = os.Remove(filepath.Join(l.dir, first))
		l.expect("")
	}
}

func TestOfSeveralWaitingFilesTheFirstByNameTakesOver(t *testing.T) {
	l := newLive(t)
	l.write("m.yaml", service("a", "10.0.0.1"))
	l.expect("a=10.0.0.1")
	l.write("z.yaml", service("a", "10.0.0.3"))
	l.expect("a=10.0.0.1", "z.yaml")
	l.write("b.yaml", service("a", "10.0.0.2"))
	l.expect("a=10.0.0.1", "b.yaml", "z.yaml")
	_ = os.Remove(filepath.Join(l.dir, "m.yaml"))
	l.expect("a=10.0.0.2", "z.yaml, document 1 (Service default/a): metadata.name: is also in b.yaml")
}

func (l *live) rename(from, to string) {
	l.t.Helper()
	if err := os.Rename(filepath.Join(l.dir, from), filepath.Join(l.dir, to)); err != nil {
		l.t.Fatal(err)
	}
}

func TestARenamedFileKeepsServing(t *testing.T) {
	for name, tt := range map[string]struct{ text, problem string }{
		"good":         {service("a", "10.0.0.1"), ""},
		"a bad object": {service("a", "10.0.0.301"), "z.yaml, document 1 (Service default/a): spec.clusterIP"},
		"no YAML":      {badYAML, "z.yaml, document 1: line 1 is not YAML"},
		"empty":        {"", "z.yaml: is empty"},
	} {
		for _, seen := range []bool{true, false} { // the content before the rename
			t.Run(fmt.Sprintf("%s seen %v", name, seen), func(t *testing.T) {
				l := newLive(t)
				l.write("m.yaml", service("a", "10.0.0.1"))
				l.expect("a=10.0.0.1")
				l.write("c.yaml", service("a", "10.0.0.9"))
				l.expect("a=10.0.0.1", "c.yaml")
				l.write("m.yaml", tt.text)
				if seen {
					_ = l.scan(nil)
				}
				l.rename("m.yaml", "z.yaml")
				problems := []string{"c.yaml, document 1 (Service default/a): metadata.name: is also in z.yaml"}
				if tt.problem != "" {
					problems = []string{"c.yaml, document 1 (Service default/a): metadata.name: was in z.yaml, whose last valid state is served",
						tt.problem}
				}
				l.expect("a=10.0.0.1", problems...)
				_ = os.Remove(filepath.Join(l.dir, "z.yaml"))
				l.expect("a=10.0.0.9")
			})
		}
	}
}

// git and cp create a new file where an operator sees a renamed one.
func TestABadCopyHoldsWhatItsOriginalServed(t *testing.T) {
	l := newLive(t)
	l.write("m.yaml", service("a", "10.0.0.1"), service("b", "10.0.0.2"))
	l.expect("a=10.0.0.1 b=10.0.0.2")
	l.write("n.yaml", service("a", "10.0.0.301"))
	l.expect("a=10.0.0.1 b=10.0.0.2", "n.yaml, document 1 (Service default/a): spec.clusterIP")
	_ = os.Remove(filepath.Join(l.dir, "m.yaml"))
	l.expect("a=10.0.0.1", "n.yaml, document 1 (Service default/a): spec.clusterIP")
	l.write("n.yaml", service("a", "10.0.0.302"))
	l.expect("a=10.0.0.1", "n.yaml, document 1 (Service default/a): spec.clusterIP")
	l.write("n.yaml", service("a", "10.0.0.3"))
	l.expect("a=10.0.0.3")
}

func TestASlipOfThePenHandsNothingToADuplicate(t *testing.T) {
	l := newLive(t)
	l.write("z.yaml", service("a", "10.0.0.1"))
	l.expect("a=10.0.0.1")
	l.write("0.yaml", service("a", "10.0.0.2"))
	l.expect("a=10.0.0.1", "0.yaml")
	l.write("z.yaml", badYAML)
	l.expect("a=10.0.0.1", "0.yaml, document 1 (Service default/a): metadata.name: was in z.yaml, whose last valid state is served",
		"z.yaml, document 1: line 1 is not YAML")
	l.write("z.yaml", service("b", "10.0.0.3")) // readable, without the object
	l.expect("a=10.0.0.2 b=10.0.0.3")
}

// Time is simulated.
func TestAFileIsGoneOnlyAfterAQuietTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLive(t)
		l.gracePeriod = goneFor
		l.write("m.yaml", service("a", "10.0.0.1"))
		l.expect("a=10.0.0.1")
		l.write("b.yaml", service("a", "10.0.0.2"))
		l.expect("a=10.0.0.1", "b.yaml")
		if _, waits := l.due(); waits {
			t.Error("it waits for a file, and none is missing")
		}
		l.rename("m.yaml", "m.yaml~")
		for range 2 { // and again after it was back meanwhile
			l.expect("a=10.0.0.1")
			time.Sleep(goneFor - 1)
			l.expect("a=10.0.0.1")
			if wait, waits := l.due(); wait != 1 || !waits {
				t.Errorf("it looks again after %v, %v; want 1 ns", wait, waits)
			}
			l.write("m.yaml", service("a", "10.0.0.3"))
			l.expect("a=10.0.0.3", "b.yaml")
			_ = os.Remove(filepath.Join(l.dir, "m.yaml"))
			l.write("m.yaml", service("a", "10.0.0.1"))
			l.expect("a=10.0.0.1", "b.yaml")
			_ = os.Remove(filepath.Join(l.dir, "m.yaml"))
		}
		l.expect("a=10.0.0.1")
		time.Sleep(goneFor)
		l.expect("a=10.0.0.2")
	})
}

func TestLostDirectoryHoldsEverything(t *testing.T) {
	l := newLive(t)
	l.write("m.yaml", service("a", "10.0.0.1"))
	l.expect("a=10.0.0.1")
	aside := l.dir + ".aside"
	if err := os.Rename(l.dir, aside); err != nil {
		t.Fatal(err)
	}
	l.expect("a=10.0.0.1", l.dir+": no such file or directory; the last state stays in effect")
	if err := os.Mkdir(l.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	l.expect("a=10.0.0.1", l.dir+": was replaced by an empty directory; the last state stays in effect")
	l.write("n.yaml", service("b", "10.0.0.2"))
	l.expect("b=10.0.0.2")
	_ = os.Remove(filepath.Join(l.dir, "n.yaml"))
	l.expect("") // emptied by hand, not replaced
}

func TestUnchangedFilesAreNotReadAgain(t *testing.T) {
	l := newLive(t)
	l.write("m.yaml", service("a", "10.0.0.1"), service("b", "10.0.0.2"))
	path := filepath.Join(l.dir, "m.yaml")
	old := time.Now().Add(-time.Hour)
	if err := os.Chtimes(path, old, old); err != nil {
		t.Fatal(err)
	}
	l.expect("a=10.0.0.1 b=10.0.0.2")
	first := l.files["m.yaml"]
	first.sum = sum{} // if it were read, it would look changed
	l.expect("a=10.0.0.1 b=10.0.0.2")
	if l.files["m.yaml"] != first {
		t.Error("a file that looks unchanged was read")
	}
	// A new mtime costs a read of the content, and no more.
	l.write("m.yaml", service("a", "10.0.0.1"), service("b", "10.0.0.2"))
	l.expect("a=10.0.0.1 b=10.0.0.2")
	second := l.files["m.yaml"]
	l.expect("a=10.0.0.1 b=10.0.0.2")
	if l.files["m.yaml"] != second {
		t.Error("a file of the same content was decoded")
	}
	// In a changed file only the changed document is decoded.
	served := l.served[key{"Service", defaultName("a")}]
	l.write("m.yaml", service("a", "10.0.0.1"), service("b", "10.0.0.3"))
	l.expect("a=10.0.0.1 b=10.0.0.3")
	if l.files["m.yaml"].definitions[key{"Service", defaultName("a")}].object != served {
		t.Error("an unchanged document was decoded")
	}
	// It seems unchanged, but it changed within the resolution of the clock.
	l.write("m.yaml", service("a", "10.0.0.1"), service("b", "10.0.0.4"))
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	l.files["m.yaml"].stamp = stampOf(info)
	l.expect("a=10.0.0.1 b=10.0.0.4")
}

func TestFileBeingWrittenIsLeftForLater(t *testing.T) {
	l := newLive(t)
	l.write("m.yaml", service("a", "10.0.0.1"))
	l.expect("a=10.0.0.1")
	f := l.files["m.yaml"]
	path := filepath.Join(l.dir, "m.yaml")
	stop, done := make(chan struct{}), make(chan struct{})
	go func() { // appends comments and removes them again until the test ends
		defer close(done)
		w, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
		if err != nil {
			return
		}
		defer w.Close()
		for i := 1; ; i++ {
			select {
			case <-stop:
				return
			default:
				_, _ = w.WriteString("#\n")
			}
			if i%10000 == 0 {
				_ = w.Truncate(f.stamp.size)
			}
		}
	}()
	seen := false
	for i := 0; i < 5000 && !seen; i++ {
		next, err := readContent(path, "m.yaml", f)
		seen = errors.Is(err, errIncomplete) && next == f
	}
	close(stop)
	<-done
	if !seen {
		t.Error("a file that changed while it was read was taken as it was")
	}
	l.expect("a=10.0.0.1")
}

func TestFileThatGoesWhileTheDirectoryIsReadIsLeftForLater(t *testing.T) {
	l := newLive(t)
	l.write("m.yaml", service("a", "10.0.0.1"))
	l.expect("a=10.0.0.1")
	f := l.files["m.yaml"]
	if err := os.Rename(filepath.Join(l.dir, "m.yaml"), filepath.Join(l.dir, "n.yaml")); err != nil {
		t.Fatal(err)
	}
	// This is the state of a scan that has listed the directory already.
	if next, err := readFile(l.dir, "m.yaml", f, true); next != f || !errors.Is(err, errIncomplete) {
		t.Errorf("the file is %v, %v; want it as it was, to come back to", next, err)
	}
	l.expect("a=10.0.0.1")
	_ = os.Remove(filepath.Join(l.dir, "n.yaml"))
	l.expect("")
}

func defaultName(name string) model.Name { return model.Name{Namespace: "default", Name: name} }

// TestWhatCouldNeverBeReadIsTold: an earlier agent may have read such a file, and
// do-not-track policies may depend on it.
func TestWhatCouldNeverBeReadIsTold(t *testing.T) {
	l := newLive(t)
	told := ""
	look := func(when, want string) {
		t.Helper()
		_ = l.scan(nil)
		if d := l.delta(); d.Unread != nil {
			told = d.Unread.Text
		}
		if told != want {
			t.Errorf("%s: %q is told as unread, want %q", when, told, want)
		}
	}
	policy := "apiVersion: policy.spillway.dev/v1alpha1\nkind: DoNotTrackPolicy\nmetadata: {name: p}\nspec: {denny: others}\n"
	l.write("a.yaml", service("a", "10.0.0.302"))
	l.write("b.yaml", service("b", "10.0.0.2"))
	look("a Service", "")
	l.write("c.yaml", service("c", "10.0.0.3"), policy)
	look("a policy", "c.yaml")
	l.write("b.yaml", badYAML)
	look("a file that was read once, and holds what it said", "c.yaml")
	l.write("c.yaml", badYAML)
	look("not even a document", "c.yaml")
	_ = os.Rename(filepath.Join(l.dir, "c.yaml"), filepath.Join(l.dir, "d.yaml"))
	look("another name", "d.yaml")
	l.write("d.yaml", service("c", "10.0.0.3"))
	look("mended", "")
	l.write("d.yaml", badYAML)
	look("bad again", "")

	l = newLive(t)
	told = ""
	l.write("a.yaml")
	look("an empty file", "a.yaml")
	l.write("a.yaml", "# nothing any more\n")
	look("a file without objects", "")
}
