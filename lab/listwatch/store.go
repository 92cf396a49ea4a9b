package listwatch

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
)

// object is what all kinds with lists are. Objects in the store are never modified.
type object interface {
	runtime.Object
	GetNamespace() string
	GetName() string
	GetLabels() map[string]string
	SetResourceVersion(string)
}

// change is one step of a kind's history: before is nil for a new object, after for a
// deleted one.
type change struct {
	version       uint64
	before, after object
}

// store keeps objects and the history of all changes. One counter gives versions to all
// kinds. It starts with the time: the versions of an earlier server at the same address
// are lower than all of this one.
type store struct {
	first   uint64
	mu      sync.Mutex
	version uint64
	objects map[schema.GroupVersionKind]map[types.NamespacedName]object
	history map[schema.GroupVersionKind][]change
	changed chan struct{} // closed with the next change
}

func newStore() *store {
	now := uint64(time.Now().UnixMicro())
	return &store{
		first:   now,
		version: now,
		objects: map[schema.GroupVersionKind]map[types.NamespacedName]object{},
		history: map[schema.GroupVersionKind][]change{},
		changed: make(chan struct{}),
	}
}

// apply creates or replaces an object.
func (s *store) apply(o runtime.Object) error {
	kind, given, err := identify(o)
	if err != nil {
		return err
	}
	after := given.DeepCopyObject().(object)
	after.GetObjectKind().SetGroupVersionKind(kind)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.record(kind, nameOf(after), after)
	return nil
}

// remove deletes an object.
func (s *store) remove(o runtime.Object) error {
	kind, given, err := identify(o)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	name := nameOf(given)
	if s.objects[kind][name] == nil {
		return fmt.Errorf("delete %s %s: there is none", kind.Kind, name)
	}
	s.record(kind, name, nil)
	return nil
}

// record adds a change to the history. The caller holds the lock.
func (s *store) record(kind schema.GroupVersionKind, name types.NamespacedName, after object) {
	s.version++
	all := s.objects[kind]
	if all == nil {
		all = map[types.NamespacedName]object{}
		s.objects[kind] = all
	}
	s.history[kind] = append(s.history[kind], change{s.version, all[name], after})
	if after == nil {
		delete(all, name)
	} else {
		after.SetResourceVersion(format(s.version))
		all[name] = after
	}
	close(s.changed)
	s.changed = make(chan struct{})
}

// list returns the selected objects of a kind, sorted by name, and the current version.
func (s *store) list(kind schema.GroupVersionKind, sel selection) ([]runtime.Object, uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []object
	for _, o := range s.objects[kind] {
		if sel.matches(o) {
			all = append(all, o)
		}
	}
	slices.SortFunc(all, func(a, b object) int {
		return cmp.Or(strings.Compare(a.GetNamespace(), b.GetNamespace()), strings.Compare(a.GetName(), b.GetName()))
	})
	out := make([]runtime.Object, len(all))
	for i, o := range all {
		out[i] = o
	}
	return out, s.version
}

// get returns one object, nil if there is none.
func (s *store) get(kind schema.GroupVersionKind, name types.NamespacedName) object {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.objects[kind][name]
}

// since returns a kind's changes after a version, the current version, and a channel that
// is closed with the next change of any kind.
func (s *store) since(kind schema.GroupVersionKind, version uint64) ([]change, uint64, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := s.history[kind]
	first, _ := slices.BinarySearchFunc(all, version+1, func(c change, v uint64) int { return cmp.Compare(c.version, v) })
	return all[first:len(all):len(all)], s.version, s.changed
}

// identify returns an object's kind; its own apiVersion and kind may be empty.
func identify(o runtime.Object) (schema.GroupVersionKind, object, error) {
	kinds, _, err := scheme.Scheme.ObjectKinds(o)
	if err != nil {
		return schema.GroupVersionKind{}, nil, fmt.Errorf("serve object: %w", err)
	}
	given, ok := o.(object)
	if !ok || given.GetName() == "" {
		return schema.GroupVersionKind{}, nil, fmt.Errorf("serve %s: it has no name", kinds[0].Kind)
	}
	return kinds[0], given, nil
}

func nameOf(o object) types.NamespacedName {
	return types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}
}

func format(version uint64) string { return strconv.FormatUint(version, 10) }

// kinds maps each resource of client-go's scheme to its kind: all kinds that have lists.
var kinds = func() map[schema.GroupVersionResource]schema.GroupVersionKind {
	out := map[schema.GroupVersionResource]schema.GroupVersionKind{}
	for kind, t := range scheme.Scheme.AllKnownTypes() {
		if kind.Version == runtime.APIVersionInternal || !scheme.Scheme.Recognizes(listOf(kind)) ||
			!reflect.PointerTo(t).Implements(reflect.TypeFor[object]()) {
			continue
		}
		plural, _ := meta.UnsafeGuessKindToResource(kind)
		out[plural] = kind
	}
	return out
}()

func listOf(kind schema.GroupVersionKind) schema.GroupVersionKind {
	return kind.GroupVersion().WithKind(kind.Kind + "List")
}
