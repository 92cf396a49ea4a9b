package store

import (
	"hash/maphash"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
)

// table holds the objects of one kind.
type table[K comparable, M any] struct {
	objects map[K]*M
	index   func(before, now *M) // updates indexes; nil: there are none
	readers []func(name K, before, now *M)
}

func (t *table[K, M]) subscribe(read func(name K, before, now *M)) {
	if read != nil {
		t.readers = append(t.readers, read)
	}
}

// set stores an object; nil deletes it.
func (t *table[K, M]) set(name K, now *M) {
	before := t.objects[name]
	switch {
	case before == nil && now == nil:
		return
	case now == nil:
		delete(t.objects, name)
	case t.objects == nil:
		t.objects = map[K]*M{name: now}
	default:
		t.objects[name] = now
	}
	if t.index != nil {
		t.index(before, now)
	}
	for _, read := range t.readers {
		read(name, before, now)
	}
}

// apply stores the objects of one kind that a Delta names. It stores before it deletes: with
// the last policy, a reader forgets what it knows.
func apply[K comparable, M any](named map[K]*M, set func(K, *M)) {
	for name, m := range named {
		if m != nil {
			set(name, m)
		}
	}
	for name, m := range named {
		if m == nil {
			set(name, nil)
		}
	}
}

// deleteUnnamed deletes the objects that a full Delta does not name.
func deleteUnnamed[K comparable, V, M any](known map[K]V, named map[K]*M, set func(K, *M)) {
	for name := range known {
		if named[name] == nil {
			set(name, nil)
		}
	}
}

// index leads from a key to objects that refer to it. Nearly every key has one.
type index[K, V comparable] map[K][]V

func (x index[K, V]) add(key K, v V) {
	if list := x[key]; !slices.Contains(list, v) {
		x[key] = append(list, v)
	}
}

func (x index[K, V]) remove(key K, v V) {
	list := slices.DeleteFunc(x[key], func(o V) bool { return o == v })
	if len(list) == 0 {
		delete(x, key)
		return
	}
	x[key] = list
}

// looseIndex leads from a key to the slices that refer to it, and to a few others. A large
// cluster has a million endpoints: the index has the hash of a key instead of the key, and
// no list for the keys of one slice, which are nearly all.
type looseIndex[K comparable] struct {
	seed maphash.Seed
	one  map[uint64]*Slice
	more index[uint64, *Slice] // without the first
}

func newLooseIndex[K comparable]() looseIndex[K] {
	return looseIndex[K]{seed: maphash.MakeSeed(), one: map[uint64]*Slice{}, more: index[uint64, *Slice]{}}
}

func (x *looseIndex[K]) add(key K, s *Slice) {
	h := maphash.Comparable(x.seed, key)
	switch x.one[h] {
	case nil:
		x.one[h] = s
	case s:
	default:
		x.more.add(h, s)
	}
}

func (x *looseIndex[K]) remove(key K, s *Slice) {
	h := maphash.Comparable(x.seed, key)
	if x.one[h] != s {
		x.more.remove(h, s)
		return
	}
	delete(x.one, h)
	if list := x.more[h]; len(list) > 0 {
		x.one[h] = list[0]
		x.more.remove(h, list[0])
	}
}

// find returns the slices that may refer to a key, in a list that may use the memory of
// buffer.
func (x *looseIndex[K]) find(key K, buffer []*Slice) []*Slice {
	h := maphash.Comparable(x.seed, key)
	list := buffer[:0]
	if s := x.one[h]; s != nil {
		list = append(append(list, s), x.more[h]...)
	}
	return list
}

// Sets has one set for each key, and no empty set: an index for keys with many objects.
type Sets[K, V comparable] map[K]map[V]struct{}

// Add adds a value to the set of a key.
func (s Sets[K, V]) Add(key K, v V) {
	if s[key] == nil {
		s[key] = map[V]struct{}{}
	}
	s[key][v] = struct{}{}
}

// Remove removes a value from the set of a key.
func (s Sets[K, V]) Remove(key K, v V) {
	delete(s[key], v)
	if len(s[key]) == 0 {
		delete(s, key)
	}
}

// indexPod updates the indexes of pods.
func (st *Store) indexPod(before, now *model.Pod) {
	if before != nil && now != nil && slices.Equal(before.IPs, now.IPs) {
		return
	}
	if before != nil {
		st.podsIn.Remove(before.Namespace, before.Name)
		for _, a := range before.IPs {
			st.podsAt.remove(a.Unmap(), before.Name)
		}
	}
	if now != nil {
		st.podsIn.Add(now.Namespace, now.Name)
		for _, a := range now.IPs {
			st.podsAt.add(a.Unmap(), now.Name)
		}
	}
}

// indexNetworkPolicy updates the lists of NetworkPolicies.
func (st *Store) indexNetworkPolicy(before, now *model.NetworkPolicy) {
	if before != nil {
		ns := before.Name.Namespace
		list := slices.DeleteFunc(st.policiesIn[ns], func(p *model.NetworkPolicy) bool { return p == before })
		if st.policiesIn[ns] = list; len(list) == 0 {
			delete(st.policiesIn, ns)
		}
	}
	if now != nil {
		ns := now.Name.Namespace
		st.policiesIn[ns] = append(st.policiesIn[ns], now)
	}
}
