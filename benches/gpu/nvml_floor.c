// The floor: bare NVML calls with nothing around them. `calls` times each call; `loop PERIOD_US SECONDS [OUT.csv]`
// polls memory on every GPU and prints rate, missed ticks, jitter and CPU. `versions SECONDS` wakes every millisecond and
// reads every GPU's memory with version 1 and with version 2 of the call in turn, and prints what each takes.
// Build: cc -O2 -o nvml_floor nvml_floor.c -ldl
// SIGUSR1 makes the loop print how many samples it has taken and missed so far, and the total time of its sweeps.
// OUT.csv contains change points, and as comments the driver's reserve of each GPU (`# reserved,GPU,BYTES`) and every
// stretch of more than 1.5 periods between two sweeps (`# gap,FROM_NS,TO_NS`). Without OUT.csv the loop only polls.
// With NVML_FLOOR_CALL=v2 in the environment the loop makes version 2 of the call, as highwater does. What it writes is the
// same: with the reserve.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <stdint.h>
#include <time.h>
#include <sys/resource.h>
#include <unistd.h>
#include <signal.h>
typedef void* dev_t_;
typedef struct { unsigned long long total, free_, used; } mem1;
typedef struct { unsigned int version; unsigned long long total, reserved, free_, used; } mem2;
typedef struct { unsigned int gpu, memory; } util_t;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gi, ci; } proc_t;
typedef struct { unsigned fieldId, scopeId; long long timestamp, latencyUsec; int valueType; int nvmlReturn; union {double d; unsigned u; unsigned long ul; unsigned long long ull; signed long long sll; int si; unsigned short us;} value; } field_t;
static int64_t now(clockid_t c){struct timespec t;clock_gettime(c,&t);return t.tv_sec*1000000000LL+t.tv_nsec;}
static int cmp(const void*a,const void*b){int64_t x=*(int64_t*)a,y=*(int64_t*)b;return x<y?-1:x>y;}
static void *L; static void* S(const char*n){void*p=dlsym(L,n); if(!p) fprintf(stderr,"missing %s\n",n); return p;}
static volatile int stop_; static void onint(int s){(void)s;stop_=1;}
static volatile int say_; static void onusr(int s){(void)s;say_=1;}
#define TIME(name,N,expr) do{ static int64_t v[100000]; int rc=0; for(int i=0;i<N;i++){int64_t ta_=now(CLOCK_MONOTONIC); rc=(expr); v[i]=now(CLOCK_MONOTONIC)-ta_;} qsort(v,N,8,cmp); printf("%-34s rc=%d n=%d min=%.1f p50=%.1f p99=%.1f max=%.1f us\n",name,rc,N,v[0]/1e3,v[N/2]/1e3,v[(int)(N*.99)]/1e3,v[N-1]/1e3);}while(0)
int main(int argc,char**argv){
  const char*mode=argc>1?argv[1]:"calls"; setvbuf(stdout,NULL,_IOLBF,0);
  L=dlopen("libnvidia-ml.so.1",RTLD_NOW); if(!L){puts(dlerror());return 1;}
  int(*init)(void)=S("nvmlInit_v2"); int(*cnt)(unsigned*)=S("nvmlDeviceGetCount_v2"); int(*hnd)(unsigned,dev_t_*)=S("nvmlDeviceGetHandleByIndex_v2");
  int(*m1)(dev_t_,mem1*)=S("nvmlDeviceGetMemoryInfo"); int(*m2)(dev_t_,mem2*)=S("nvmlDeviceGetMemoryInfo_v2");
  int(*ut)(dev_t_,util_t*)=S("nvmlDeviceGetUtilizationRates"); int(*pw)(dev_t_,unsigned*)=S("nvmlDeviceGetPowerUsage");
  int(*te)(dev_t_,int,unsigned*)=S("nvmlDeviceGetTemperature"); int(*ck)(dev_t_,int,unsigned*)=S("nvmlDeviceGetClockInfo");
  int(*pc)(dev_t_,int,unsigned*)=S("nvmlDeviceGetPcieThroughput"); int(*cp)(dev_t_,unsigned*,proc_t*)=S("nvmlDeviceGetComputeRunningProcesses_v3");
  int(*fv)(dev_t_,int,field_t*)=S("nvmlDeviceGetFieldValues"); int(*en)(dev_t_,unsigned long long*)=S("nvmlDeviceGetTotalEnergyConsumption");
  int(*th)(dev_t_,unsigned long long*)=S("nvmlDeviceGetCurrentClocksThrottleReasons"); int(*bar)(dev_t_,mem1*)=S("nvmlDeviceGetBAR1MemoryInfo");
  int(*gs)(dev_t_,int,unsigned long long,int*,unsigned*,void*)=S("nvmlDeviceGetSamples");
  unsigned n=0; printf("init rc=%d\n",init()); cnt(&n); printf("devices %u\n",n); dev_t_ d[16]; for(unsigned i=0;i<n;i++) hnd(i,&d[i]);
  if(!strcmp(mode,"calls")){
    mem1 a; mem2 b; memset(&b,0,sizeof b); b.version=(unsigned)(sizeof(mem2)|(2<<24)); util_t u; unsigned x; unsigned long long e; proc_t P[256];
    TIME("MemoryInfo v1",20000,m1(d[0],&a)); TIME("MemoryInfo v2",20000,m2(d[0],&b)); printf("total=%llu used=%llu free=%llu reserved(v2)=%llu used(v2)=%llu\n",a.total,a.used,a.free_,b.reserved,b.used);
    TIME("UtilizationRates",5000,ut(d[0],&u)); TIME("PowerUsage",2000,pw(d[0],&x)); TIME("Temperature",5000,te(d[0],0,&x)); TIME("ClockInfo SM",5000,ck(d[0],1,&x)); TIME("ClockInfo MEM",5000,ck(d[0],2,&x));
    TIME("TotalEnergy",5000,en(d[0],&e)); TIME("ThrottleReasons",5000,th(d[0],&e)); TIME("BAR1",5000,bar(d[0],&a)); 
    TIME("PcieThroughput TX",20,pc(d[0],0,&x)); unsigned c; TIME("ComputeProcesses_v3",2000,(c=256,cp(d[0],&c,P))); printf("procs=%u first pid=%u used=%llu\n",c,P[0].pid,P[0].used);
    field_t f[4]; memset(f,0,sizeof f); f[0].fieldId=138;f[0].scopeId=(unsigned)-1; f[1].fieldId=139;f[1].scopeId=(unsigned)-1; TIME("FieldValues NVLINK data tx+rx",2000,fv(d[0],2,f)); printf("nvlink tx rc=%d val=%llu rx rc=%d val=%llu\n",f[0].nvmlReturn,f[0].value.ull,f[1].nvmlReturn,f[1].value.ull);
    memset(f,0,sizeof f); f[0].fieldId=186; TIME("FieldValue power instant",2000,fv(d[0],1,f)); printf("power instant rc=%d %u\n",f[0].nvmlReturn,f[0].value.u);
    memset(f,0,sizeof f); f[0].fieldId=197; f[1].fieldId=198; TIME("FieldValue PCIe tx/rx count",2000,fv(d[0],2,f)); printf("pcie rc=%d %llu rc=%d %llu\n",f[0].nvmlReturn,f[0].value.ull,f[1].nvmlReturn,f[1].value.ull);
    int vt; unsigned sc=0; int rc=gs(d[0],1,0,&vt,&sc,NULL); printf("GetSamples GPU_UTIL count rc=%d n=%u\n",rc,sc);
    // GPM
    int(*ga)(void**)=S("nvmlGpmSampleAlloc"); int(*gg)(dev_t_,void*)=S("nvmlGpmSampleGet"); void*smp=NULL; if(ga&&gg&&ga(&smp)==0) TIME("GpmSampleGet",500,gg(d[0],smp));
    for(unsigned g=0;g<n;g++){TIME("MemoryInfo v1 (each gpu)",5000,m1(d[g],&a)); b.version=(unsigned)(sizeof(mem2)|(2<<24)); if(m2&&m2(d[g],&b)==0) printf("gpu %u reserved(v2)=%llu\n",g,b.reserved);}
  } else if(!strcmp(mode,"loop")){ // loop PERIOD_US SECONDS [OUT.csv]: paced polling of memory on all GPUs; prints jitter, missed, CPU; writes change points as CSV
    int64_t per=atoll(argv[2])*1000; double secs=atof(argv[3]); FILE*o=argc>4?fopen(argv[4],"w"):NULL; signal(SIGINT,onint); signal(SIGTERM,onint); signal(SIGUSR1,onusr);
    int64_t N=(int64_t)(secs*1e9/per)+1; int64_t*lat=malloc(8*N),*dur=malloc(8*N); int64_t k=0,missed=0,swept=0; int64_t t0=now(CLOCK_MONOTONIC),next=t0+per; mem1 a; unsigned long long last[16]={0}; int64_t changes=0;
    int64_t prev=0,prevreal=0; const char*call=getenv("NVML_FLOOR_CALL"); int v2=call&&!strcmp(call,"v2"); mem2 c; memset(&c,0,sizeof c); c.version=(unsigned)(sizeof c|(2<<24));
    if(v2&&!m2){fprintf(stderr,"NVML_FLOOR_CALL=v2: this driver has no nvmlDeviceGetMemoryInfo_v2\n");return 1;}
    if(o){ fprintf(o,"# realtime_ns,gpu,used_bytes ; change points only, plus first\n"); for(unsigned i=0;i<n;i++) if(m2&&m2(d[i],&c)==0) fprintf(o,"# reserved,%u,%llu\n",i,c.reserved); }
    while(k<N && !stop_){ struct timespec ts={next/1000000000LL,next%1000000000LL}; while(clock_nanosleep(CLOCK_MONOTONIC,TIMER_ABSTIME,&ts,NULL)==EINTR&&!stop_);
      int64_t a0=now(CLOCK_MONOTONIC); lat[k]=a0-next; if(o){ int64_t real=now(CLOCK_REALTIME); if(prev&&a0-prev>per+per/2) fprintf(o,"# gap,%lld,%lld\n",(long long)prevreal,(long long)real); prev=a0; prevreal=real; }
      for(unsigned i=0;i<n;i++){ if(v2){m2(d[i],&c);a.used=c.used+c.reserved;}else m1(d[i],&a); if(a.used!=last[i]||k==0){changes++; last[i]=a.used; if(o) fprintf(o,"%lld,%u,%llu\n",(long long)now(CLOCK_REALTIME),i,a.used);} }
      int64_t a1=now(CLOCK_MONOTONIC); dur[k]=a1-a0; swept+=a1-a0; k++; next+=per; if(next<a1){int64_t s=(a1-next)/per+1; missed+=s; next+=s*per;} if(say_){ say_=0; printf("so far samples=%lld missed=%lld sweep_ns=%lld\n",(long long)k,(long long)missed,(long long)swept); } if(a1-t0>secs*1e9) break; }
    int64_t wall=now(CLOCK_MONOTONIC)-t0; struct rusage r; getrusage(RUSAGE_SELF,&r); double cpu=r.ru_utime.tv_sec+r.ru_utime.tv_usec/1e6+r.ru_stime.tv_sec+r.ru_stime.tv_usec/1e6;
    qsort(lat,k,8,cmp); qsort(dur,k,8,cmp); printf("loop period=%lldus gpus=%u samples=%lld missed=%lld rate=%.1fHz wake p50=%.1f p99=%.1f p99.9=%.1f max=%.1f us; sweep p50=%.1f p99=%.1f max=%.1f us; cpu=%.2f%% of a core; change points=%lld\n",(long long)per/1000,n,(long long)k,(long long)missed,k*1e9/wall,lat[k/2]/1e3,lat[(int64_t)(k*.99)]/1e3,lat[(int64_t)(k*.999)]/1e3,lat[k-1]/1e3,dur[k/2]/1e3,dur[(int64_t)(k*.99)]/1e3,dur[k-1]/1e3,cpu*1e11/wall,(long long)changes); if(o) fclose(o);
  } else if(!strcmp(mode,"versions")){
    static int64_t took[2][100000]; int64_t k=0,sum[2]={0,0},next=now(CLOCK_MONOTONIC); double secs=argc>2?atof(argv[2]):10; mem1 a; mem2 b; memset(&b,0,sizeof b); b.version=(unsigned)(sizeof b|(2<<24));
    if(!m2){fprintf(stderr,"versions: this driver has no nvmlDeviceGetMemoryInfo_v2\n");return 1;}
    for(;k<2*(int64_t)(secs*500)&&k<200000;k++){ next+=1000000; struct timespec ts={next/1000000000LL,next%1000000000LL}; while(clock_nanosleep(CLOCK_MONOTONIC,TIMER_ABSTIME,&ts,NULL)==EINTR);
      int v=k%2; int64_t a0=now(CLOCK_MONOTONIC); for(unsigned i=0;i<n;i++){ if(v) m2(d[i],&b); else m1(d[i],&a); } took[v][k/2]=now(CLOCK_MONOTONIC)-a0; sum[v]+=took[v][k/2]; }
    for(int v=0;v<2&&k>1;v++){ qsort(took[v],k/2,8,cmp); printf("version %d: n=%lld mean=%.2f p50=%.2f p90=%.2f us for %u GPUs\n",v+1,(long long)(k/2),sum[v]/1e3/(k/2),took[v][k/4]/1e3,took[v][k/2*9/10]/1e3,n); }
  }
  return 0; }
