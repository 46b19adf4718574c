"""Declarations of the kernel's variables whose types BTF leaves out, as its sources have them.

One line per variable. Where releases differ a name has several, and the first whose type the
kernel has counts. An array's length is a number, an enumerator, or what the symbol's size tells; a
struct without a name is known by its members.
"""

VARIABLES = """\
struct task_struct init_task;
struct task_group root_task_group;
struct pid_namespace init_pid_ns;
struct mm_struct init_mm;
struct net init_net;
struct uts_namespace init_uts_ns;
struct ipc_namespace init_ipc_ns;
struct user_namespace init_user_ns;
struct nsproxy init_nsproxy;
struct cred init_cred;
struct fs_struct init_fs;
unsigned long avenrun[3];
const char * const task_state_array[9];
struct kmem_cache *task_struct_cachep;
struct kmem_cache *thread_stack_cache;
struct hlist_head uidhash_table[];
int ipc_mni_shift;

struct rq runqueues;
unsigned int nr_cpu_ids;
unsigned int nr_node_ids;
unsigned long __per_cpu_offset[];
struct cpumask __cpu_online_mask;
struct cpumask __cpu_possible_mask;
struct cpumask __cpu_present_mask;
struct cpumask __cpu_active_mask;
nodemask_t node_states[NR_NODE_STATES];
pg_data_t *node_data[];
struct pglist_data contig_page_data;

struct mem_section **mem_section;
unsigned long __highest_present_section_nr;
unsigned long page_offset_base;
unsigned long vmalloc_base;
unsigned long vmemmap_base;
s64 memstart_addr;
char *saved_command_line;
unsigned long max_pfn;
unsigned long max_low_pfn;
unsigned long min_low_pfn;
unsigned long max_mapnr;
struct page *mem_map;
struct memblock memblock;
atomic_long_t _totalram_pages;
unsigned long totalram_pages;
atomic_long_t vm_zone_stat[NR_VM_ZONE_STAT_ITEMS];
atomic_long_t vm_node_stat[NR_VM_NODE_STAT_ITEMS];
atomic_long_t vm_numa_stat[NR_VM_NUMA_STAT_ITEMS];
atomic_long_t vm_numa_event[NR_VM_NUMA_EVENT_ITEMS];
struct percpu_counter vm_committed_as;
int sysctl_overcommit_ratio;
unsigned long sysctl_overcommit_kbytes;
struct rb_root vmap_area_root;
struct list_head vmap_area_list;
struct vmap_node *vmap_nodes;
unsigned int nr_vmap_nodes;
unsigned int vmap_zone_size;
struct list_head slab_caches;
struct kset *slab_kset;
struct hstate hstates[];
int hugetlb_max_hstate;
atomic_long_t nr_swap_pages;
long total_swap_pages;
unsigned int nr_swapfiles;
struct swap_info_struct *swap_info[];
struct address_space *swapper_spaces[];
unsigned int nr_swapper_spaces[];

struct list_head modules;
struct mod_tree_root mod_tree;
struct kobj_type module_ktype;
unsigned long tainted_mask;
const struct taint_flag taint_flags[];
char kernel_config_data[];
struct printk_ringbuffer *prb;
u64 jiffies_64;
struct tk_data tk_core;
struct {seq timekeeper} tk_core;
struct tk_data timekeeper_data[];

struct list_head super_blocks;
struct super_block *blockdev_superblock;
const struct file_operations ns_file_operations;
struct char_device_struct *chrdevs[255];
struct kobj_map *cdev_map;
struct blk_major_name *major_names[255];
struct kernfs_node *sysfs_root_kn;
struct cgroup_root cgrp_dfl_root;
struct list_head net_namespace_list;
struct neigh_table arp_tbl;

struct class block_class;
struct kset *class_kset;
struct kset *bus_kset;
struct kset *devices_kset;
struct kobj_type device_ktype;
struct kobj_type class_ktype;
struct kobj_type bus_ktype;
struct kobj_type driver_ktype;
struct bus_type pci_bus_type;
struct list_head pci_root_buses;
struct bus_type memory_subsys;
int sections_per_block;
struct resource ioport_resource;
struct resource iomem_resource;

struct xarray irq_desc_tree;
struct maple_tree sparse_irqs;
unsigned int total_nr_irqs;
int nr_irqs;
gate_desc idt_table[256];
struct softirq_action softirq_vec[NR_SOFTIRQS];
struct timer_list poll_spurious_irq_timer;
struct list_head workqueues;

struct idr prog_idr;
struct idr map_idr;
struct idr link_idr;
struct idr btf_idr;
"""
